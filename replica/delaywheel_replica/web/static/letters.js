// Dead letters: by topic and reason, one letter, replay and drop; a dry run counts first.

import { confirmed } from "./acting.js";
import { post } from "./api.js";
import { content, facts, foreign, h, put, table } from "./dom.js";
import { inWords } from "./headers.js";
import { mayAct } from "./page.js";
import { counted, moment, when } from "./times.js";

const FIELDS = [["topic", "Topic"], ["reason", "Reason"], ["key", "Key (text)"], ["id", "Id (hex)"], ["from", "Letters from (ISO 8601 with zone, or now-1h)"],
  ["to", "Letters before"], ["halves_of", "Half messages of group"], ["dead_topic", "A consumer's dead-letter topic"]];

const OTHERS = "(others)";

export function letters(_state, query) {
  const form = h("form", {}, h("details", { open: FIELDS.some(([name]) => query.get(name)) }, h("summary", {}, "Which ones"),
    h("div", { class: "fields" }, FIELDS.map(([name, text]) => h("p", {}, h("label", { for: name }, text), h("input", { id: name, name, value: query.get(name) ?? "" })))),
    h("button", {}, "Show these")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    location.hash = `dead?${new URLSearchParams([...new FormData(form)].filter(([, value]) => value))}`;
  });
  const found = h("div", {}, h("p", { role: "status" }, "reading the letters' topic"));
  const element = h("div", {}, h("h1", {}, "Dead letters"), form, found);
  const chosen = Object.fromEntries(FIELDS.map(([name]) => [name, query.get(name)]).filter(([, value]) => value !== null)); // empty: of those without one
  const look = () => post("dead/list", chosen).then((list) => put(found, ...listed(list, chosen, look)))
    .catch((error) => put(found, failed(error)));
  look();
  return { element };
}

function listed(list, chosen, again) {
  const link = (more) => `#dead?${new URLSearchParams({ ...chosen, ...more })}`;
  const where = Object.fromEntries(["halves_of", "dead_topic"].filter((name) => chosen[name]).map((name) => [name, chosen[name]]));
  const waiting = list.counts.reduce((sum, row) => sum + row.waiting, 0);
  return [h("p", {}, "Waiting in ", foreign(list.topic ?? ""), `: ${counted(waiting, "letter")}`, list.complete ? "." : "; the first of them are listed."),
    h("h2", {}, "By topic and reason"), table(["topic", "reason", "waiting", "replayed", "dropped"], list.counts.map((row) => [
      foreign(row.topic || "none", 300), row.topic === OTHERS ? "all those beyond the first rows" : h("a", { href: link({ topic: row.topic, reason: row.reason }) }, foreign(row.reason || "none", 300)),
      row.waiting.toLocaleString("en"), row.replayed.toLocaleString("en"), row.dropped.toLocaleString("en")]), "no such letter that you may read"),
    settling(chosen, again),
    h("h2", {}, "Letters"), table(["letter", "since", "reason", "topic", "bytes"], list.letters.map((each) => [
      h("a", { href: `#letter?${new URLSearchParams({ place: each.place, ...where })}` }, each.place), when(each.timestamp_ms),
      foreign(each.reason ?? "none", 300), foreign(each.topic ?? "none", 300), each.length_bytes.toLocaleString("en")]))];
}

// Replay and drop of what is chosen: counted first, and the count is typed where it is more than one.
function settling(chosen, again) {
  if (!mayAct("operate")) return null;
  const said = h("div", { role: "status" });
  const settle = async (command, done, consequence) => {
    try {
      const dry = await post(`dead/${command}`, chosen);
      if (!dry.would) return put(said, "no such letter waits");
      if (!await confirmed([h("span", {}, counted(dry.would, "letter")), consequence], dry.would > 1 ? dry.would : null)) return put(said, "nothing was changed");
      put(said, "at it");
      const { done: settled, refused, refused_letters: examples } = await post(`dead/${command}`, { ...chosen, limit: dry.would, execute: true });
      put(said, h("p", {}, `${counted(settled, "letter")} ${done}`),
        table(["not sent, they wait on", "letters"], Object.entries(refused).map(([why, count]) => [foreign(why), count.toLocaleString("en")]), ""),
        table(["letter", "why"], examples.map((each) => [each.place, foreign(each.why)]), ""),
        h("button", { onclick: again }, "Look again"));
    } catch (error) {
      put(said, failed(error), h("p", {}, "Some may be done: the same again is safe, each is sent once."));
    }
  };
  return h("section", {}, h("button", { onclick: () => settle("replay", "sent again", "Each is sent to the topic where it was to go, at once.") }, "Replay: count first"),
    h("button", { onclick: () => settle("drop", "dropped", "They are marked as dealt with, and never sent. Kafka keeps them as long as it keeps their topic.") }, "Drop: count first"), said);
}

export function letter(_state, query) {
  const { place = "", ...where } = Object.fromEntries(query);
  const element = h("div", {}, h("h1", {}, "A dead letter"), h("p", { role: "status" }, "looking for it"));
  const look = () => post("dead/show", { place, ...where }).then((found) => put(element, h("h1", {}, "A dead letter"), ...shown(found),
    found.state === "waiting" ? settling({ places: [place], ...where }, look) : null))
    .catch((error) => put(element, h("h1", {}, "A dead letter"), failed(error)));
  look();
  return { element };
}

function shown(found) {
  const settled = found.settled && `${found.state} at ${moment(found.settled.at_ms)}${found.settled.to ? `, to ${found.settled.to}` : ""}`;
  return [facts([["state", foreign(settled ?? found.state)], ["place", found.place], ["since", when(found.timestamp_ms)],
    ["reason", foreign(found.reason ?? "none")], ["detail", found.detail && foreign(found.detail)], ["topic", foreign(found.topic ?? "none")],
    ["id", found.id], ["due", found.due_ms == null ? null : when(found.due_ms)]]), inWords(found.headers),
  h("h2", {}, "Key"), content(found.key), h("h2", {}, "Value"), content(found.value),
  h("h2", {}, "Headers"), table(["name", "value"], found.headers.map((each) => [foreign(each.name), content(each.value)]))];
}

function failed(error) {
  return h("p", { class: "bad" }, `not known: ${error.reason}: `, foreign(error.message));
}
