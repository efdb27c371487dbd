"""The openai client for a TwoLane router: ask for a lane, and see which one answered and why."""

from twolane.client import AsyncTwoLane, TwoLane
from twolane.decision import Decision, Judged, Verdict
from twolane.lane import Lane, Transport, lane_of

__all__ = ["AsyncTwoLane", "Decision", "Judged", "Lane", "Transport", "TwoLane", "Verdict", "lane_of"]
