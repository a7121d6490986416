// The page's frame: which view is shown, asking again and again, and the token where one is needed.

import {el, hideTip} from "./charts.js";
import {jobsView, jobView, nodesView} from "./views.js";

const INTERVAL_MS = 2000;
const SLOW_MS = 15000;  // what does not change any more, and after an error
const TOKEN = "ringleader-token";

const main = document.getElementById("main");
const status = document.getElementById("status");
const forget = document.getElementById("forget");

class Refused extends Error {
  constructor(code, message) {
    super(message);
    this.status = code;
  }
}

async function get(path, parameters = {}) {
  const asked = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== ""));
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? {Authorization: `Bearer ${token}`} : {};
  const reply = await fetch(asked.size ? `${path}?${asked}` : path, {headers, credentials: "same-origin", redirect: "error"});
  const body = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Refused(reply.status, body.error ?? `HTTP ${reply.status}`);
  return body;
}

let view, timer, round = 0;

function say(text, lost = false) {
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("lost", lost);
}

function askForToken(why) {
  const input = el("input", {type: "password", autocomplete: "off", required: true, id: "token"});
  const form = el("form", {class: "card notice"}, el("h1", {}, "Show a token"),
                  el("p", {class: "muted"}, "An admin makes one with ringctl token create. It stays in this tab. " +
                     "A browser with a certificate of the coordinator's authority needs none."),
                  why ? el("p", {class: "error", role: "alert"}, why) : "",
                  el("p", {class: "controls"}, el("label", {class: "wide", for: "token"}, "Token", input),
                     el("button", {}, "Open")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(TOKEN, input.value.trim());
    show();
  });
  say("Needs a token", true);
  main.replaceChildren(form);
  input.focus();
}

async function tick() {
  clearTimeout(timer);
  const mine = ++round;
  let pause = INTERVAL_MS;
  try {
    const live = await view.refresh();
    if (mine !== round) return;
    say(live === false ? "Ended" : "Live");
    if (live === false) pause = SLOW_MS;
  } catch (error) {
    if (mine !== round) return;
    if (error.status === 401) {
      const had = sessionStorage.getItem(TOKEN) !== null;
      sessionStorage.removeItem(TOKEN);
      forget.hidden = true;
      return askForToken(had ? error.message : "");
    }
    const known = error instanceof Refused;
    say(known ? error.message : "The coordinator does not answer", true);
    if (!known && !(error instanceof TypeError)) console.error(error);
    if (known) pause = SLOW_MS;
  }
  timer = setTimeout(tick, pause);
}

function show() {
  hideTip();
  const [, place, name] = location.hash.split("/");
  if (place === "jobs" && /^[\w.-]+$/.test(name ?? "")) view = jobView(get, tick, name);
  else if (place === "nodes") view = nodesView(get, tick);
  else view = jobsView(get, tick);
  document.title = `${view.title} · Ringleader`;
  forget.hidden = sessionStorage.getItem(TOKEN) === null;
  for (const link of document.querySelectorAll("nav a")) {
    const current = link.dataset.view === (place === "nodes" ? "nodes" : "jobs");
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.replaceChildren(...view.elements);
  tick();
}

forget.addEventListener("click", () => {
  sessionStorage.removeItem(TOKEN);
  show();
});
addEventListener("hashchange", () => {
  show();
  main.focus();
});
addEventListener("resize", () => view.draw?.());
// A tab that nobody looks at asks nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else tick();
});
show();
