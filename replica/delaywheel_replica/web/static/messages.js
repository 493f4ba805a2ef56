// A second's messages, one message, and looking messages up.

import { call } from "./api.js";
import { cancelMany, offered } from "./acting.js";
import { base64Of, bytesOf, content, facts, foreign, h, put, table } from "./dom.js";
import { inWords } from "./headers.js";
import { counted, moment, when } from "./times.js";
import { way } from "./way.js";

const PAGE = 100;
const STATES = {
  PENDING: "pending", DONE: "delivered, a dead letter, or cancelled at about its due", CANCELLED: "cancelled: never delivered",
  DELIVERED: "delivered", DEAD_LETTERED: "a dead letter", HELD: "half message: held, nobody has said what became of its transaction",
  COMMITTED: "half message: committed, and on its way", ROLLED_BACK: "half message: rolled back, never delivered",
  ASKED: "half message: its group is asked, or was", UNDECIDED: "half message: its group had no answer",
};

export function second(_state, query) {
  const slot = query.get("slot") ?? "";
  const element = h("div", {}, h("h1", {}, "A second"), h("p", {}, /^\d+$/.test(slot) ? moment(Number(slot) * 1000) : ""));
  paged(element, "GetSlot", { slot, page_size: PAGE });
  return { element };
}

export function search(_state, query) {
  const field = (name, text) => h("p", {}, h("label", { for: name }, text), h("input", { id: name, name, value: query.get(name) ?? "" }));
  const form = h("form", {}, field("handle", "Handle"), h("p", { class: "dim" }, "or all of these"),
    h("div", { class: "fields" }, field("topic", "Topic"), field("key", "Key (text)"), field("id", "Id (hex)"), field("header", "Header (NAME or NAME=VALUE)"),
      field("from", "Due from (ISO 8601 with zone)"), field("to", "Due before")), h("button", {}, "Look up"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
    location.hash = given.get("handle") ? `message?handle=${encodeURIComponent(given.get("handle"))}` : `search?${given}`;
  });
  const element = h("div", {}, h("h1", {}, "Look up"), form);
  if ([...query.keys()].length) {
    try {
      const filter = filterOf(query);
      const found = h("section", {});
      element.append(h("div", {}, cancelMany(filter)), found);
      paged(found, "Search", { filter, page_size: PAGE });
    } catch (error) {
      element.append(h("p", { class: "bad", role: "alert" }, error.message));
    }
  }
  return { element };
}

function filterOf(query) {
  const filter = {};
  if (query.get("topic")) filter.topic = query.get("topic");
  if (query.get("key")) filter.key = base64Of(query.get("key"));
  if (query.get("id")) filter.id = idOf(query.get("id"));
  if (query.get("header")) {
    const [name, value] = query.get("header").split(/=(.*)/s, 2);
    filter.header = value == null ? { name } : { name, value: base64Of(value) };
  }
  for (const end of ["from", "to"]) {
    if (query.get(end)) filter[`${end}_ms`] = String(msOf(query.get(end)));
  }
  return filter;
}

function idOf(text) {
  const digits = text.replace(/-/g, "");
  if (!/^[0-9a-f]{32}$/i.test(digits)) throw new Error("an id has 32 hex digits");
  return btoa(String.fromCharCode(...digits.match(/../g).map((pair) => parseInt(pair, 16))));
}

export function msOf(text) {
  if (!/(Z|[+-]\d\d:?\d\d)$/.test(text.trim())) throw new Error(`${text}: say its zone, as 2030-01-31T12:00:00Z`);
  const ms = Date.parse(text.trim());
  if (Number.isNaN(ms)) throw new Error(`${text}: is no time, as 2030-01-31T12:00:00Z`);
  return ms;
}

// Adds pages to an element as they are asked for: never all at once.
function paged(element, name, request) {
  const listed = h("div", {}), looked = h("p", { class: "dim", role: "status" });
  const more = h("button", {}, "More");
  let token = "";
  const next = async () => {
    more.disabled = true;
    try {
      const answer = await call(name, token ? { ...request, page_token: token } : request);
      token = answer.next_page_token ?? "";
      put(listed, rows(answer.messages ?? [], name === "GetSlot"));
      put(looked, said(answer), token ? " There is more." : answer.silent ? "" : " That is all.");
      more.hidden = !token;
    } catch (error) {
      put(looked, h("span", { class: "bad" }, `not known: ${error.reason}: ${error.message}`));
      more.hidden = false;
    }
    more.disabled = false;
  };
  more.addEventListener("click", next);
  element.append(looked, listed, more);
  next();
}

function said({ looked, silent }) {
  if (!looked) return (silent ?? []).map((each) => `${each.node} has not listed all: ${each.why}.`).join(" ");
  const upTo = looked.to_slot ? ` Seconds before ${moment(Number(looked.to_slot) * 1000)} were examined.` : "";
  const lacks = looked.incomplete ? " There may be more matches: the node lacks frames, or cannot read some." : "";
  return `${looked.node} examined ${counted(looked.messages ?? 0, "message")}.${upTo}${lacks}`;
}

// Of one second the date is above: here are the milliseconds.
function rows(messages, ofOneSecond) {
  return table([ofOneSecond ? "due, ms in it" : "due", "topic", "state", "value", "handle"], messages.map((each) => [
    ofOneSecond ? String(Number(each.due_ms) % 1000) : when(each.due_ms), foreign(each.topic, 300), stateOf(each), sizeOf(each.value_length_bytes),
    h("a", { href: `#message?handle=${encodeURIComponent(each.handle)}` }, foreign(each.handle, 300))]), "no message on this page");
}

function sizeOf(length) {
  return Number(length ?? 0) < 0 ? "null" : counted(length ?? 0, "byte");
}

function stateOf(each) {
  return STATES[(each.state ?? "").replace("MESSAGE_STATE_", "")] ?? "not told";
}

export function message(_state, query) {
  const handle = query.get("handle") ?? "";
  const element = h("div", {}, h("h1", {}, "A message"), h("p", { role: "status" }, "looking for it"));
  const said = h("p", { role: "status" });
  const look = async () => {
    try {
      const { message: found } = await call("GetMessage", { message: { handle }, find_place: true });
      put(element, h("h1", {}, "A message"), said, shown(found), offered(found, said, look), way(idText(found)));
    } catch (error) {
      put(element, h("h1", {}, "A message"), h("p", { class: "bad", role: "alert" },
        error.status === 404 ? `no node knows it: ${error.message}` : `not known: ${error.reason}: ${error.message}`));
    }
  };
  look();
  return { element };
}

function idText(found) {
  return Array.from(bytesOf(found.id), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function shown(found) {
  const place = found.place;
  return [facts([
    ["state", stateOf(found)], ["why", found.dead_reason ? foreign(found.dead_reason) : null],
    ["due", when(found.due_ms)],
    ["rescheduled to", found.rescheduled_to_ms ? when(found.rescheduled_to_ms) : null],
    ["accepted", when(found.accepted_at_ms)], ["topic", foreign(found.topic)],
    ["partition", found.partition == null ? "by its key" : String(found.partition)],
    ["in Kafka", place ? `${place.topic}/${place.partition ?? 0}/${place.offset ?? 0}` : null],
    ["id", idText(found)], ["handle", foreign(found.handle)], ["lies in", `wheel ${found.wheel ?? "not told"}, frame ${found.seq ?? 0}`],
  ]), found.content_withheld ? h("p", {}, "Key, value and headers are withheld: you have no right 'read' in its topic.") : [
    inWords(found.headers), h("h2", {}, "Key"), content(found.key), h("h2", {}, `Value, ${sizeOf(found.value_length_bytes)}`), content(found.value),
    h("h2", {}, "Headers"), table(["name", "value"], (found.headers ?? []).map((each) => [foreign(each.name ?? ""), content(each.value)])),
  ]];
}
