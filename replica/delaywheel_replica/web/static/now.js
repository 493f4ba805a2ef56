// Now: trouble first, then nodes, wheels, rates and lateness of the last minutes.

import { facts, foreign, h, put, table } from "./dom.js";
import { about, counted, moment } from "./times.js";

export function now(state) {
  const element = h("div", {});
  const update = (name = "cluster") => {
    if (name === "cluster") show(element, state);
  };
  update();
  return { element, update };
}

function show(element, state) {
  const told = state.told.cluster;
  if (!told) return put(element, h("p", {}, "waiting for the nodes' answer"));
  const status = told.status;
  const members = status.members ?? [];
  put(element,
    h("h1", { class: told.verdict.toLowerCase() }, told.verdict),
    h("ul", { class: "causes" }, told.causes.map((cause) => h("li", { class: cause.is_down ? "bad" : "" },
      foreign(cause.text), h("span", { class: "dim" }, ` RUNBOOK: ${cause.section}`)))),
    facts([
      ["cluster", foreign(status.cluster_id ?? "")],
      ["leader", status.leader?.node ?? "none"],
      ["late", status.lateness_ms == null ? "not told" : about(Number(status.lateness_ms))],
      ["pending", pending(status.pending)],
      ["told by", `${status.node}, release ${status.version}`],
      ["at", moment(told.at_ms)],
    ]),
    h("h2", {}, "Of the last minutes"), rates(state.history),
    h("h2", {}, "Nodes"), nodes(status, members),
    h("h2", {}, "Copies"), copies(status),
    halves(members));
}

function pending(told) {
  if (!told) return "not told";
  return `${told.at_least ? "at least " : ""}${counted(told.messages ?? 0, "message")}`;
}

function nodes(status, members) {
  return table(["node", "role", "takes messages", "release", "clock", "elections", "certificate", "unpublished"],
    members.map((member) => {
      const report = member.report;
      if (!report) return [member.node, null, member.accepting ? "yes" : "no", null, foreign(member.silent ?? ""), null, null, null];
      const ahead = Number(report.now_ms) - Number(status.now_ms);
      return [member.node, report.role || "its cleaner is silent", member.accepting ? "yes" : "no", report.version,
        Math.abs(ahead) < 1000 ? "agrees" : `${about(Math.abs(ahead))} ${ahead > 0 ? "ahead" : "behind"}`,
        String(report.elections ?? 0), report.certificate_expires_ms ? moment(report.certificate_expires_ms) : "none",
        counted(report.ledger?.lag_frames ?? 0, "frame")];
    }));
}

function copies(status) {
  const rows = (status.wheels ?? []).map((wheel) => [wheel.wheel, word(wheel.state, "WHEEL_STATE_"),
    String(wheel.applied_seq ?? 0), String(wheel.high_watermark ?? 0),
    (wheel.replicas ?? []).map((copy) => `${copy.node}: ${word(copy.state, "REPLICA_STATE_")}`).join(", ")]);
  return table(["wheel", "state", "frames", "acknowledged", "copies"], rows);
}

function halves(members) {
  const rows = members.flatMap((member) => (member.report?.unanswered_halves ?? []).map((each) =>
    [foreign(each.group), String(each.letters), moment(each.oldest_ms)]));
  return rows.length ? [h("h2", {}, "Half messages that wait for their checker"),
    table(["group", "letters", "the first since"], rows)] : null;
}

function word(state, prefix) {
  return (state ?? "unknown").replace(prefix, "").toLowerCase().replace(/_/g, " ");
}

// Rates between the first and the last snapshot that this tab has, of those processes that ran on.
function rates(history) {
  const first = history[0], last = history[history.length - 1];
  const seconds = (last.at_ms - first.at_ms) / 1000;
  if (seconds < 2) return h("p", { class: "dim" }, "from the third second on");
  const before = byNode(first), sums = { accepted: 0, forwarded: 0, refused: 0, dead: 0 };
  const late = { bounds: [], counts: [] };
  let told = false;
  for (const [node, report] of byNode(last)) {
    const then = before.get(node);
    if (!report.counts || !then?.counts) continue;
    told = true;
    const same = (name) => report[name] === then[name];
    if (same("server_started_ms")) {
      sums.accepted += grown(report.counts, then.counts, "accepted_messages");
      sums.refused += total(report.counts.refused_messages) - total(then.counts.refused_messages);
    }
    if (same("cleaner_started_ms")) {
      sums.forwarded += grown(report.counts, then.counts, "forwarded_messages");
      sums.dead += total(report.counts.dead_letters) - total(then.counts.dead_letters);
      add(late, report.counts.lateness, then.counts.lateness);
    }
  }
  if (!told) return h("p", { class: "dim" }, "not told: nodes of an earlier release");
  const rate = (sum) => `${(sum / seconds).toLocaleString("en", { maximumFractionDigits: 1 })} a second`;
  return facts([["over", about(seconds * 1000)], ["accepted", rate(sums.accepted)],
    ["forwarded", rate(sums.forwarded)], ["refused", counted(sums.refused, "message")],
    ["dead letters", counted(sums.dead, "message")],
    ["lateness p50", upTo(late, 0.5)], ["lateness p99", upTo(late, 0.99)]]);
}

function byNode(told) {
  return new Map((told.status.members ?? []).filter((m) => m.report).map((m) => [m.node, m.report]));
}

function grown(after, before, name) {
  return Number(after[name] ?? 0) - Number(before[name] ?? 0);
}

function total(counts) {
  return (counts ?? []).reduce((sum, each) => sum + Number(each.messages ?? 0), 0);
}

function add(late, after, before) {
  if (!after?.counts) return;
  late.bounds = after.bounds_us.map(Number);
  after.counts.forEach((count, place) => {
    late.counts[place] = (late.counts[place] ?? 0) + Number(count) - Number(before?.counts?.[place] ?? 0);
  });
}

function upTo(late, share) {
  const all = late.counts.reduce((sum, count) => sum + count, 0);
  if (!all) return "nothing was forwarded";
  let seen = 0;
  const place = late.counts.findIndex((count) => (seen += count) >= all * share);
  return place < late.bounds.length ? `up to ${about(late.bounds[place] / 1000)}` : `above ${about(late.bounds.at(-1) / 1000)}`;
}
