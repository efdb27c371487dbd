"use strict";
// Shows and presses the stop buttons. All text from the router is set as text, never as markup.

const at = (id) => document.getElementById(id);
let offered = "";
let key = sessionStorage.getItem("twolane-key") || "";

async function ask(method, path, body) {
  const headers = key ? { authorization: "Bearer " + key } : {};
  if (body) headers["content-type"] = "application/json";
  const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
  const told = await answer.json();
  if (told.error) throw new Error(told.error.message);
  return told;
}

function say(words, good) {
  at("said").textContent = words;
  at("said").className = good ? "good" : "";
}

function row(...cells) {
  const line = document.createElement("tr");
  for (const cell of cells) {
    const place = document.createElement("td");
    if (cell instanceof Node) place.append(cell); else place.textContent = cell;
    line.append(place);
  }
  return line;
}

function button(words, press) {
  const made = document.createElement("button");
  made.textContent = words;
  made.addEventListener("click", press);
  return made;
}

const moment = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "");

async function press(method, path, body, done) {
  try {
    const told = await ask(method, path, body);
    say(done + (told.note ? " " + told.note : ""), true);
  } catch (error) {
    say(error.message);
  }
  await show();
}

function withReason(words, act) {
  const reason = window.prompt(words + " Reason, for the record:");
  if (reason && reason.trim()) act(reason.trim());
}

function showStops(told) {
  at("state").textContent = told.data.length ? "Parts of the cache lane are stopped." : "Nothing is stopped.";
  at("stops").replaceChildren(...told.data.map((stop) => row(
    stop.target + (stop.drill ? " (a drill)" : ""), stop.by, moment(stop.at), stop.reason,
    stop.seq === 0 ? "by itself" : button("Lift", () => withReason("Lift " + stop.target + ".", (reason) =>
      press("DELETE", "/admin/stops", { target: stop.target, reason }, stop.target + " is lifted."))),
  )));
  at("running").replaceChildren(...told.running.map((call) => row(call.id, call.tenant, call.pair, call.seconds.toFixed(1))));
}

function showPairs(told) {
  at("pairs").replaceChildren(...told.data.map((pair) => row(
    pair.name, pair.standing.state, pair.standing.why, moment(pair.standing.until),
    pair.workers.map((one) => one.worker + (one.state.ready ? "" : ": " + one.state.reason)).join(", ") || "none",
    pair.standing.state === "active" ? "" : button("Reinstate", () => withReason("Reinstate " + pair.name + ".", (reason) =>
      press("POST", "/admin/pairs/" + encodeURIComponent(pair.name) + "/reinstate", { reason }, pair.name + " is in force."))),
  )));
  showChoices(["cache", ...told.data.map((pair) => "pair:" + pair.name), ...told.tenants.map((name) => "tenant:" + name)]);
}

function showChoices(choices) {
  if (choices.join() === offered) return; // a list that somebody has open stays as it is
  offered = choices.join();
  const chosen = at("target").value;
  at("target").replaceChildren(...choices.map((target) => {
    const choice = document.createElement("option");
    choice.value = target;
    choice.textContent = target === "cache" ? "the whole cache lane" : target.replace(":", " ");
    return choice;
  }));
  if (choices.includes(chosen)) at("target").value = chosen;
}

async function show() {
  try {
    showStops(await ask("GET", "/admin/stops"));
    showPairs(await ask("GET", "/admin/pairs"));
  } catch (error) {
    at("state").textContent = error.message;
  }
}

at("who").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  at("key").value = "";
  sessionStorage.setItem("twolane-key", key);
  say("");
  show();
});

at("stop").addEventListener("submit", (event) => {
  event.preventDefault();
  const body = { target: at("target").value, reason: at("reason").value, drill: at("drill").checked };
  if (at("by").value.trim()) body.by = at("by").value.trim();
  press("POST", "/admin/stops", body, body.target + " is stopped.");
});

show();
setInterval(show, 2000);
