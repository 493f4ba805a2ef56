"""scripts/bench: how much is accepted, how late messages come, and what it costs, beside Kafka.

Absolute figures are the machine's. What can be compared are ratios: in each round Kafka's own
producer, Kafka's transactions of the same cadence, and delaywheel do the same, one after the other
and first another one each round, with the same consumer and the same settings. So do, where ingress
is measured, delaywheel's SDK and a Kafka producer that sends to the ingress topic.

`workloads` names what can be measured; `cli` reads what was asked for and `running` has it done, in
`rounds` of which disturbed ones are void. `stand` is the cluster with the processes around it:
`sending` (four processes that send) and `consuming` (one that receives). `usage` reads CPU time
and context switches from /proc. `figures` computes, `report` prints, `page` draws.
"""
