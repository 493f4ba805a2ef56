// Now: trouble first, then nodes, wheels, rates and lateness of the last minutes.

import { call } from "./api.js";
import { facts, foreign, h, put, table } from "./dom.js";
import { lateMs, summed } from "./history.js";
import { may } from "./page.js";
import { plot } from "./plot.js";
import { about, clock, counted, size, when } from "./times.js";

const REFUSED_EVERY_MS = 10000;
const NOTHING = "nothing was forwarded";

export function now(state) {
  const told = h("div", {}), below = h("div", {}), lately = over(state), refused = refusedOnes(state);
  const element = h("div", {}, told, lately.element, below, refused.element);
  const update = (name = "cluster") => {
    if (name !== "cluster") return;
    show(told, below, state);
    lately.update();
  };
  update();
  const tick = () => {
    lately.draw();
    refused.tick();
  };
  return { element, update, tick };
}

function show(element, below, state) {
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
      ["at", when(told.at_ms)],
    ]));
  put(below, h("h2", {}, "Nodes"), nodes(status, members), remarks(members),
    h("h2", {}, "Copies"), copies(status),
    halves(status, members), quotas(state.who));
}

function pending(told) {
  if (!told) return "not told";
  return `${told.at_least ? "at least " : ""}${counted(told.messages ?? 0, "message")}`;
}

function nodes(status, members) {
  return table(["node", "role", "takes messages", "release", "clock", "elections", "certificate", "unpublished", "on its disk", "free disk"],
    members.map((member) => {
      const report = member.report;
      if (!report) return [member.node, null, member.accepting ? "yes" : "no", null, foreign(member.silent || "not told"), null, null, null, null, null];
      const ahead = Number(report.now_ms) - Number(status.now_ms);
      return [member.node, report.role || "its cleaner is silent", member.accepting ? "yes" : "no", report.version,
        Math.abs(ahead) < 1000 ? "agrees" : `${about(Math.abs(ahead))} ${ahead > 0 ? "ahead" : "behind"}`,
        String(report.elections ?? 0), report.certificate_expires_ms ? when(report.certificate_expires_ms) : "none",
        counted(report.ledger?.lag_frames ?? 0, "frame"), counted(report.pending_messages ?? 0, "message"),
        report.disk ? `${size(report.disk.free_bytes ?? 0)}, reserve ${size(report.disk.reserve_bytes ?? 0)}` : null];
    }));
}

// What nodes say of themselves that is no trouble yet.
function remarks(members) {
  const said = members.flatMap(({ node, report }) => [["INSECURE", report?.insecure], ["not checked", report?.unchecked]]
    .filter(([, text]) => text).map(([what, text]) => [node, what, text]));
  return said.map(([node, what, text]) => h("p", { class: what === "INSECURE" ? "bad" : "dim" }, `${node}: ${what}: `, foreign(text, 1000)));
}

function copies(status) {
  const rows = (status.wheels ?? []).map((wheel) => [wheel.wheel, word(wheel.state, "WHEEL_STATE_"),
    String(wheel.applied_seq ?? 0), String(wheel.high_watermark ?? 0),
    (wheel.replicas ?? []).map((copy) => `${copy.node}: ${word(copy.state, "REPLICA_STATE_")}`).join(", ") || "not told"]);
  return table(["wheel", "state", "frames", "acknowledged", "copies"], rows);
}

// Who leads tells which letters wait. Answers do not name their group: those who led have counted them.
function halves(status, members) {
  const counts = members.map((member) => member.report?.counts?.halves).filter(Boolean);
  const sum = (name) => counts.reduce((all, each) => all + Number(each[name] ?? 0), 0).toLocaleString("en");
  const rows = members.flatMap((member) => (member.report?.unanswered_halves ?? []).map((each) =>
    [foreign(each.group, 300), Number(each.letters).toLocaleString("en"), when(each.oldest_ms), h("a", { href: `#dead?${new URLSearchParams({ halves_of: each.group })}` },
      h("code", {}, "delaywheel dead list --halves-of ", foreign(each.group, 300)))]));
  const leads = members.some((member) => member.report?.role === "leading");
  return [h("h2", {}, "Half messages"), facts([
    ["asked", counts.length ? sum("asked") : "not told"],
    ["answered", counts.length ? `committed ${sum("committed")}, rolled back ${sum("rolled_back")}, undecided ${sum("undecided")}` : "not told"],
    ["counted by", `${counts.length} of ${counted(members.length, "node")}, for all groups, since their cleaners started`],
    ["all letters", h("code", {}, "delaywheel tail --from-beginning --until-end delaywheel-", foreign(status.cluster_id ?? ""), "-halves")]]),
  table(["group", "letters that wait", "the first since", "undecided ones"], rows, leads ? "no letter waits" : "whether letters wait: not told, no node leads")];
}

function word(state, prefix) {
  return (state ?? "unknown").replace(prefix, "").toLowerCase().replace(/_/g, " ");
}

// Rates and lateness of the last 15 minutes, as far as this tab has been open.
function over(state) {
  const rate = (name) => (step) => step[name] * 1000 / (step.to_ms - step.from_ms);
  const rates = plot("Messages a second", ["accepted", "forwarded", "refused", "dead"].map((name) => [name === "dead" ? "dead letters" : name, rate(name)]), few);
  const late = plot("Lateness", [["p50", drawnMs(0.5)], ["p99", drawnMs(0.99)]], about);
  const facing = h("div", {}), listed = h("div", {}), why = h("div", {});
  const plots = h("div", { class: "plots", hidden: true }, rates.element, late.element);
  const element = h("section", {}, h("h2", {}, "The last 15 minutes"), facing, plots, why,
    h("details", {}, h("summary", {}, "Table, by the minute"), listed));
  const draw = () => {
    for (const each of [rates, late]) each.draw(state.history.all(), Date.now());
  };
  const update = () => {
    const steps = state.history.all(), sum = summed(steps);
    plots.hidden = !sum.told;
    if (!steps.length) return put(facing, h("p", { class: "dim" }, "from the next answer on"));
    const untold = sum.untold.size ? `not told by ${[...sum.untold].join(", ")}` : "";
    if (!sum.told) return put(facing, h("p", { class: "dim" }, untold));
    put(facing, h("p", { class: "dim" }, `kept in this tab, for ${about(sum.seconds * 1000)} so far${untold && `; ${untold}`}`), facts([
      ["accepted", `${few(sum.accepted / sum.seconds)} a second`], ["forwarded", `${few(sum.forwarded / sum.seconds)} a second`],
      ["lateness", lateMs(sum.late, 0.5) === null ? NOTHING : `p50 ${upTo(sum.late, 0.5)}, p99 ${upTo(sum.late, 0.99)}`]]));
    put(why, reasons("Refused", sum.refusedBy), reasons("Dead letters", sum.deadBy));
    put(listed, table(["from", "accepted", "forwarded", "refused", "dead letters", "p50", "p99"], byMinute(steps).map(([minute, each]) =>
      [clock(minute), each.accepted, each.forwarded, each.refused, each.dead].map((cell) => cell.toLocaleString("en"))
        .concat(upTo(each.late, 0.5), upTo(each.late, 0.99)))));
    draw();
  };
  return { element, update, draw };
}

// What is beyond all bounds is drawn at the last of them, which it is above.
function drawnMs(share) {
  return (step) => {
    const ms = lateMs(step.late, share);
    return ms === Infinity ? step.late.bounds.at(-1) / 1000 : ms;
  };
}

function byMinute(steps) {
  const minutes = new Map();
  for (const step of steps) {
    const minute = Math.floor(step.from_ms / 60000) * 60000;
    minutes.set(minute, [...(minutes.get(minute) ?? []), step]);
  }
  return [...minutes].reverse().map(([minute, of]) => [minute, summed(of)]);
}

function reasons(title, counts) {
  if (!counts.size) return null;
  const rows = [...counts].sort((one, other) => other[1] - one[1]).slice(0, 20);
  return [h("h3", {}, title), table(["reason", "messages"], rows.map(([reason, count]) => [foreign(reason, 300), count.toLocaleString("en")]))];
}

function few(number) {
  return number.toLocaleString("en", { maximumFractionDigits: number < 10 ? 1 : 0 });
}

function upTo(late, share) {
  const ms = lateMs(late, share);
  if (ms === null) return NOTHING;
  return ms === Infinity ? `above ${about(late.bounds.at(-1) / 1000)}` : `up to ${about(ms)}`;
}

// Who was refused for a quota: a viewer's own question, since the stream tells all viewers the same.
function refusedOnes(state) {
  const element = h("div", {});
  let asked = -Infinity;
  const tick = async () => {
    if (state.who.unlimited || !may("operate") || Date.now() - asked < REFUSED_EVERY_MS) return;
    asked = Date.now();
    let listed;
    try {
      const { members } = await call("DescribeCluster", { all_members: true });
      const rows = (members ?? []).flatMap((member) => (member.report?.quota_refusals ?? []).map((each) =>
        [foreign(each.principal), member.node, Number(each.messages).toLocaleString("en")]));
      listed = table(["who", "by node", "messages and questions, since it started"], rows, "nobody, as far as the nodes tell");
    } catch (error) {
      listed = h("p", { class: "bad" }, `not known: ${error.reason}: `, foreign(error.message));
    }
    put(element, h("h2", {}, "Refused for their quotas"), listed);
  };
  tick();
  return { element, tick };
}

// What the viewer may take of each node: of topics what may be pending there.
function quotas(who) {
  const said = (quota) => Object.entries(quota).filter(([name]) => name !== "topics").map(([name, most]) => `${Number(most).toLocaleString("en")} ${name.replace(/_/g, " ")}`).join(", ");
  const rows = [...(who.quota ? [["all", said(who.quota)]] : []), ...(who.topic_quotas ?? []).map((each) => [foreign(each.topics.join(", "), 1000), said(each)])];
  return rows.length ? [h("h2", {}, "Your quotas, of each node"), table(["topics", "at most"], rows)] : null;
}
