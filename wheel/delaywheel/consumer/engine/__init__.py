"""The thread behind a consumer: it fetches, commits, and takes part in the group.

Handlers run on the caller's threads, for as long as they like: this thread keeps polling Kafka
meanwhile, so the group does not consider the consumer dead. What it fetches is bounded; beyond the
bound, partitions are paused.

| what happens | what is done |
|---|---|
| partitions are revoked, or the end is near | nothing more is handed out; what is in hand may be |
|   | settled, for `drain`; what is settled is committed; the rest is forgotten |
| partitions are lost | they are forgotten |
| partitions are assigned | the committed offsets are read, once no transaction is open there |
| a transaction fails, or perhaps failed | nothing is handed out; a new producer ends what the |
|   | old one had begun, the note beside the committed offsets says which transaction set them, |
|   | and what is held is kept: its handlers have begun, or are spared |
| it is refused because of its records | half as many are committed at once; one alone gets |
|   | another outcome: a dead letter, or one without its value |
| Kafka refuses something for want of a right | `rights_watch` has the table |
| Kafka is away | the same again, a little later each time |
"""

from delaywheel.consumer.engine.loop import Engine

__all__ = ["Engine"]
