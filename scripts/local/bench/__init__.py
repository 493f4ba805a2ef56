"""scripts/bench: the rate of acceptance, the lateness of messages, and their cost, beside Kafka.

Absolute figures depend on the machine. Ratios can be compared: in each round Kafka's own producer,
Kafka's transactions of the same cadence, and delaywheel do the same, one after the other in
changing order, with the same consumer and the same settings. Where ingress is measured, so do
delaywheel's SDK and a Kafka producer that sends to the ingress topic.

`workloads` lists what can be measured; `cli` parses the request, and `running` carries it out in
`rounds`, of which disturbed ones are void. `stand` is the cluster with the processes around it:
`sending` (four processes that send) and `consuming` (one that receives). `usage` reads CPU time and
context switches from /proc. `figures` computes, `report` prints, `page` draws.
"""
