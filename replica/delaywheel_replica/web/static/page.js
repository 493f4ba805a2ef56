// The page: who looks, which view the address names, and what the stream told last.

import { live, get, onSignedOut, signIn, signOut } from "./api.js";
import { h, put } from "./dom.js";
import { History } from "./history.js";
import { acts } from "./acts.js";
import { letter, letters } from "./letters.js";
import { message, search, second } from "./messages.js";
import { now } from "./now.js";
import { moment } from "./times.js";
import { wheel } from "./wheel.js";

const VIEWS = { "": now, now, wheel, second, message, search, dead: letters, letter, acts };
const OLD_MS = 3000;
const root = document.getElementById("page");
const state = { told: {}, heard: 0, history: new History(), who: null, shown: null };
let listening = null;

async function begin() {
  const secret = /^#secret=([\w-]+)$/.exec(location.hash);
  if (secret) {
    history.replaceState(null, "", "#now");
    try {
      await signIn(secret[1]);
    } catch (error) {
      return ask(error.message);
    }
  }
  try {
    state.who = await get("page");
  } catch (error) {
    if (error.status !== 401) ask(error.message);
    return;
  }
  frame();
}

function ask(why = "") {
  listening?.abort();
  state.who = null;
  const token = h("input", { type: "password", id: "token", autocomplete: "off", required: true });
  const said = h("p", { role: "alert", class: "bad" }, why);
  const form = h("form", { class: "sign-in" },
    h("h1", {}, "delaywheel"),
    h("label", { for: "token" }, "Bearer token, or the secret of the printed link"), token,
    h("button", {}, "Sign in"), said);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await signIn(token.value);
      state.who = await get("page");
      frame();
    } catch (error) {
      put(said, error.message);
    }
  });
  put(root, form);
  token.focus();
}

function frame() {
  const links = [["now", "Now"], ["wheel", "The wheel"], ["search", "Look up"], ["dead", "Dead letters"], ["acts", "Acts"]];
  state.banner = h("div", { role: "status", class: "banner" });
  state.view = h("main", { id: "main" });
  const who = state.who.unlimited ? "everybody (no grants)" : state.who.principal;
  put(root,
    h("header", {},
      h("strong", {}, "delaywheel"),
      h("nav", {}, links.map(([name, text]) => h("a", { href: `#${name}` }, text))),
      h("span", { class: "who" }, who, state.who.read_only ? ", read only" : ""),
      h("button", { onclick: () => signOut().finally(() => ask()) }, "Sign out")),
    state.banner, state.view);
  listening = new AbortController();
  live(heard, listening.signal);
  route();
}

export function may(right) {
  return state.who.unlimited || state.who.may.includes(right);
}

// Whether acts that need a right are offered.
export function mayAct(right) {
  return may(right) && !state.who.read_only;
}

function heard(name, data) {
  if (name === "end") return ask(data.message);
  state.told[name] = data;
  if (name === "cluster") {
    state.heard = Date.now();
    state.history.add(data);
    delete state.told.away;
  }
  state.shown?.update?.(name);
}

function tick() {
  if (!state.who) return;
  const age = Date.now() - state.heard;
  const old = state.heard && age > OLD_MS;
  const away = state.told.away;
  const lines = [];
  if (state.told.cluster?.insecure) lines.push("INSECURE: other machines reach this page without TLS, or nodes without grants.");
  if (away) lines.push(`Nodes do not answer: ${away.reason}: ${away.message}`);
  if (old) lines.push(`What is shown is of ${moment(state.heard)}, ${Math.floor(age / 1000).toLocaleString("en")} s ago.`);
  put(state.banner, lines.map((line) => h("p", { class: "bad" }, line)));
  state.view.classList.toggle("old", Boolean(old || away));
  state.shown?.tick?.();
}

function route() {
  if (!state.who) return;
  const [name, query = ""] = location.hash.slice(1).split("?");
  const view = VIEWS[name] ?? now;
  state.shown = view(state, new URLSearchParams(query));
  put(state.view, state.shown.element);
  for (const link of root.querySelectorAll("nav a")) {
    const here = link.getAttribute("href") === `#${name || "now"}`;
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

onSignedOut((error) => ask(error.message));
addEventListener("hashchange", () => {
  if (location.hash.startsWith("#secret=")) begin();
  else route();
});
setInterval(tick, 1000);
begin();
