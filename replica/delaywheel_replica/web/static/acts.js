// The last acts of this page.

import { get } from "./api.js";
import { foreign, h, put, table } from "./dom.js";
import { when } from "./times.js";

export function acts() {
  const element = h("div", {}, h("h1", {}, "Acts"), h("p", { role: "status" }, "asking"));
  get("acts").then(({ acts: found }) => put(element, h("h1", {}, "Acts"),
    h("p", { class: "dim" }, "The last 1,000 of this page since it started. The nodes' audit logs have all."),
    table(["when", "who", "from", "call", "what", "outcome"], found.map((act) => [when(act.time_ms), foreign(act.who ?? "not known"), act.from,
      act.call, foreign(JSON.stringify(act.what)), foreign(JSON.stringify(act.outcome))]))))
    .catch((error) => put(element, h("h1", {}, "Acts"), h("p", { class: "bad" }, `not known: ${error.reason}: ${error.message}`)));
  return { element };
}
