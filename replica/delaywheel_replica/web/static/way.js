// A message's way, as `delaywheel trace` tells it: steps in their order, and what was looked at.

import { post } from "./api.js";
import { foreign, h, put, table } from "./dom.js";
import { about, counted, moment, when } from "./times.js";

const HIDDEN = new Set(["step", "began", "time", "time_ms", "kind", "id", "topic", "key", "tags", "status", "why", "cluster", "told_by", "root", "reporter", "number"]);

export function way(id) {
  const element = h("section", {}, h("h2", {}, "Its way"));
  const said = h("div", { role: "status" });
  const look = async () => {
    put(said, "searching");
    try {
      const found = await post("trace", { target: id });
      put(said, found.ways.map(drawn), found.nothing && h("p", {}, foreign(found.nothing)), looked(found));
    } catch (error) {
      put(said, h("p", { class: "bad" }, `not known: ${error.reason}: `, foreign(error.message)));
    }
  };
  element.append(h("button", { onclick: look }, "Look for its way"), said);
  return element;
}

function drawn(found) {
  const clocks = found.clocks_differ;
  return [h("ol", { class: "way" }, found.steps.map((step) => h("li", { class: step.step },
    h("strong", {}, step.step), " ", step.status ? foreign(step.status) : null, h("br"),
    step.time ? when(Date.parse(step.time)) : "time not known",
    step.why ? h("div", { class: "bad" }, foreign(step.why, 2000)) : null,
    h("div", { class: "dim" }, foreign(rest(step, found), 4000))))),
  clocks && h("p", { class: "bad" }, `clocks differ by at least ${about(clocks.ms)}: `, foreign(`${clocks.ahead} is ahead of ${clocks.behind}`))];
}

function rest(step, found) {
  const own = step.topic && step.topic !== found.topic ? [`topic ${step.topic}`] : [];
  const id = step.id && step.id !== found.root ? [`id ${step.id}`] : [];
  const more = Object.entries(step).filter(([name, value]) => !HIDDEN.has(name) && value != null)
    .map(([name, value]) => named(name, value));
  return [...own, ...id, ...more, step.told_by === "nodes" ? "told by the nodes" : ""].filter(Boolean).join("; ");
}

// A column by its name: those of times as times, of others the unit last.
function named(name, value) {
  const [, what, unit] = /^(.*?)(?:_(ms|us|bytes))?$/.exec(name);
  const said = what.replace(/_/g, " ");
  return unit === "ms" && value > 1e11 ? `${said} ${moment(value)}` : `${said} ${value}${unit ? ` ${unit}` : ""}`;
}

function looked(found) {
  const none = found.searched.length ? null : h("p", {}, "No index of traces was searched: the page was started without --index. The nodes know two minutes after a due.");
  const of = (index) => [foreign(index.index), index.from ? `${moment(Date.parse(index.from))} to ${moment(Date.parse(index.to))}` : "no file",
    index.newest ? moment(Date.parse(index.newest)) : null, index.gaps.map((gap) => `${gap.from} to ${gap.to}`).join(", ") || "none",
    index.dropped == null ? null : counted(index.dropped, "event"),
    index.shares == null ? null : index.shares.map((each) => `${each.client}: ${each.share}`).join(", ") || "all"];
  return [none, found.searched.length ? table(["index", "searched", "newest event", "never read", "dropped", "traced"], found.searched.map(of)) : null,
    found.missing.map((each) => h("p", { class: "bad" }, "not shown: ", foreign(`${each.part}: ${each.reason}: ${each.message}`)))];
}
