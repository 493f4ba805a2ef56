// What nodes counted, of the last 15 minutes: kept in this tab, one step each five seconds.
// A step has what grew in it, of those processes that ran on; `told` is false if no node told any.

const STEP_MS = 5000;
const KEPT_MS = 15 * 60 * 1000;

export class History {
  steps = [];
  #first = null;
  #last = null;

  add(told) {
    const sample = { at_ms: told.at_ms, nodes: new Map((told.status.members ?? []).map((m) => [m.node, m.report])) };
    this.#first ??= sample;
    this.#last = sample;
    if (sample.at_ms - this.#first.at_ms < STEP_MS) return;
    this.steps.push(grown(this.#first, sample));
    this.#first = sample;
    this.steps = this.steps.filter((step) => step.to_ms > sample.at_ms - KEPT_MS);
  }

  // Whole steps, and the one that is being made.
  all() {
    return this.#last && this.#last !== this.#first ? [...this.steps, grown(this.#first, this.#last)] : this.steps;
  }
}

function nothing(more) {
  return { told: false, untold: new Set(), accepted: 0, forwarded: 0, refused: 0, dead: 0, late: { bounds: [], counts: [] }, refusedBy: new Map(), deadBy: new Map(), ...more };
}

function grown(before, after) {
  const step = nothing({ from_ms: before.at_ms, to_ms: after.at_ms });
  for (const [node, report] of after.nodes) {
    const then = before.nodes.get(node), now = then?.counts && report?.counts;
    if (!now || !report.cleaner_started_ms) step.untold.add(node);
    if (!now) continue;
    step.told = true;
    if (report.server_started_ms === then.server_started_ms) {
      step.accepted += more(now.accepted_messages, then.counts.accepted_messages);
      step.refused += byReason(step.refusedBy, now.refused_messages, then.counts.refused_messages);
    }
    if (report.cleaner_started_ms === then.cleaner_started_ms) {
      step.forwarded += more(now.forwarded_messages, then.counts.forwarded_messages);
      step.dead += byReason(step.deadBy, now.dead_letters, then.counts.dead_letters);
      addLate(step.late, now.lateness?.bounds_us, now.lateness?.counts, then.counts.lateness?.counts);
    }
  }
  return step;
}

export function summed(steps) {
  const sum = nothing({ seconds: 0 });
  for (const step of steps) {
    sum.told ||= step.told;
    step.untold.forEach((node) => sum.untold.add(node));
    for (const name of ["accepted", "forwarded", "refused", "dead"]) sum[name] += step[name];
    sum.seconds += (step.to_ms - step.from_ms) / 1000;
    addLate(sum.late, step.late.bounds, step.late.counts);
    for (const by of ["refusedBy", "deadBy"]) step[by].forEach((count, reason) => sum[by].set(reason, (sum[by].get(reason) ?? 0) + count));
  }
  return sum;
}

// Up to which milliseconds a share of the messages was late; null: none, Infinity: beyond all bounds.
export function lateMs({ bounds, counts }, share) {
  const all = counts.reduce((sum, count) => sum + count, 0);
  let seen = 0;
  const place = counts.findIndex((count) => (seen += count) >= all * share);
  return all ? (bounds[place] ?? Infinity) / 1000 : null;
}

function more(after, before) {
  return Number(after ?? 0) - Number(before ?? 0);
}

function byReason(into, after, before) {
  const then = new Map((before ?? []).map((each) => [each.reason, each.messages]));
  return (after ?? []).reduce((sum, each) => {
    const count = more(each.messages, then.get(each.reason));
    if (count) into.set(each.reason, (into.get(each.reason) ?? 0) + count);
    return sum + count;
  }, 0);
}

function addLate(late, bounds, after, before) {
  if (!after?.length) return;
  late.bounds = bounds.map(Number);
  after.forEach((count, place) => { late.counts[place] = (late.counts[place] ?? 0) + more(count, before?.[place]); });
}
