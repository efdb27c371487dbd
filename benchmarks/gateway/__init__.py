"""The router under load beside other gateways, on one machine, over the same fake upstream."""
