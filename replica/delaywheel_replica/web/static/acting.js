// Acts: each says first what it will do, and to how many; then what became of each message.

import { call } from "./api.js";
import { foreign, h, put, table } from "./dom.js";
import { msOf } from "./messages.js";
import { mayAct } from "./page.js";
import { counted, moment } from "./times.js";

const OUTCOMES = {
  CANCELLED: "cancelled: it is never delivered", ALREADY_DELIVERED: "delivered already, deferred, or a dead letter: nothing was done",
  TOO_LATE: "too late: nothing was done, it is delivered", NOT_FOUND: "not found: no node knows it",
  RESCHEDULED: "rescheduled", UNSPECIFIED: "not known: do the same again",
};

function outcome(result) {
  if (result.error?.reason) return foreign(`${result.error.reason}: ${result.error.message}`);
  const name = (result.outcome ?? "UNSPECIFIED").replace(/^(CANCEL|RESCHEDULE)_OUTCOME_/, "");
  const due = result.due_ms && Number(result.due_ms) ? `; due ${moment(result.due_ms)}` : "";
  return `${OUTCOMES[name] ?? name}${due}`;
}

// Asks in a dialog; for many the count has to be typed.
export function confirmed(lines, count) {
  return new Promise((answer) => {
    const typed = count == null ? null : h("input", { id: "count", inputmode: "numeric", autocomplete: "off" });
    const yes = h("button", { value: "yes", disabled: typed !== null }, "Do it");
    typed?.addEventListener("input", () => { yes.disabled = typed.value.trim() !== String(count); });
    const dialog = h("dialog", { "aria-label": "Confirm" }, h("form", { method: "dialog" }, lines.map((line) => h("p", {}, line)),
      typed && h("p", {}, h("label", { for: "count" }, `Type the count, ${count}, to go on`), typed),
      h("button", { value: "no" }, "Leave it"), yes));
    dialog.addEventListener("close", () => { answer(dialog.returnValue === "yes" && !yes.disabled); dialog.remove(); });
    document.body.append(dialog);
    dialog.showModal();
  });
}

// `said` outlasts the message as it is shown: an act has it looked up again.
export function offered(message, said, again) {
  const isHalf = /HELD|COMMITTED|ROLLED_BACK|ASKED|UNDECIDED/.test(message.state ?? "");
  if (message.state !== "MESSAGE_STATE_PENDING" && !isHalf) return null;
  if (isHalf) return h("p", { class: "dim" }, "Half messages are committed and rolled back by their senders and checkers alone.");
  if (!mayAct("change")) return null;
  const ref = { handle: message.handle };
  const act = async (lines, work) => {
    if (!await confirmed(lines)) return;
    try {
      const { results } = await work();
      put(said, outcome(results[0]));
      again();
    } catch (error) {
      put(said, h("span", { class: "bad" }, error.status ? `${error.reason}: ${error.message}` : "not known: look at the message"));
    }
  };
  const due = h("input", { id: "due", placeholder: "2030-01-31T12:00:00Z" });
  const what = ["of topic ", foreign(message.topic, 300), `, due ${moment(message.due_ms)}`];
  return h("section", {}, h("h2", {}, "Acts"),
    h("button", { onclick: () => act([["1 message ", ...what].map((part) => part), "It is cancelled: it will never be delivered."].map((line) => h("span", {}, line)),
      () => call("Cancel", { messages: [ref] })) }, "Cancel it"),
    h("p", {}, h("label", { for: "due" }, "Another due"), due,
      h("button", { onclick: () => {
        let ms;
        try { ms = msOf(due.value); } catch (error) { return put(said, error.message); }
        return act([h("span", {}, "1 message ", what), `It is delivered at ${moment(ms)}, or at its due if that comes first.`],
          () => call("Reschedule", { messages: [{ message: ref, deliver_at_ms: String(ms) }] }));
      } }, "Reschedule it")));
}

// Cancels what a filter finds: a dry run counts first, and its count is typed.
export function cancelMany(filter) {
  if (!mayAct("change") || !["topic", "key", "id", "header"].some((name) => name in filter)) return null;
  const said = h("div", { role: "status" });
  const every = async (dry) => {
    const results = [], request = { filter, limit: 1000, dry_run: dry };
    let halves = 0, incomplete = false;
    do {
      const answer = await call("CancelMany", request);
      results.push(...(answer.results ?? []));
      halves += answer.halves ?? 0;
      incomplete ||= Boolean(answer.looked?.incomplete);
      request.page_token = answer.next_page_token ?? "";
      put(said, `${dry ? "counting" : "cancelling"}: ${counted(results.length, "message")}`);
    } while (request.page_token && results.length < 100000);
    return { results, halves, incomplete, cut: Boolean(request.page_token) };
  };
  const run = async () => {
    try {
      const dry = await every(true);
      if (!dry.results.length) return put(said, dry.incomplete ? "none found; the node lacks frames, there may be some" : "none found");
      const more = dry.cut ? ["Only the first 100,000 were counted."] : [];
      if (!await confirmed([`${counted(dry.results.length, "message")} match, and will never be delivered.`,
        `${counted(dry.halves, "half message")} match, and are left alone.`, ...more], dry.results.length)) return put(said, "nothing was changed");
      const done = await every(false);
      const by = new Map();
      for (const each of done.results) by.set(outcome({ outcome: each.outcome }), (by.get(outcome({ outcome: each.outcome })) ?? 0) + 1);
      put(said, table(["what became of them", "messages"], [...by].map(([name, count]) => [name, count.toLocaleString("en")])),
        table(["handle", "what became of it"], done.results.slice(0, 1000).map((each) => [foreign(each.handle, 300), outcome({ outcome: each.outcome })])));
    } catch (error) {
      put(said, h("p", { class: "bad" }, `stopped, some may be done: ${error.reason}: ${error.message}. The same again is safe.`));
    }
  };
  return h("section", {}, h("button", { onclick: run }, "Cancel all that match: count first"), said);
}
