"""Encodes the results of a request's messages as bytes of a DelayProduceResponse.

Thousands of messages may be refused for the same reason: its error is encoded once.
"""

from delaywheel.identity import WheelId
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.intake.validate import RequestBatch
from delaywheel_replica.server.node.refusals import Refusal


def row_results(batch: RequestBatch, wheel: WheelId | None) -> bytes:
    """Returns the results of a request of rows: one for each message, in order."""
    ids = batch.columns.ids.tobytes().hex()
    errors: dict[Refusal, bytes] = {}
    checked = set(batch.checked)
    results = []
    for row, due_ms in enumerate(batch.columns.due_ms.tolist()):
        refusal = batch.refusals.get(row)
        if refusal is None:
            handle = f"{wheel}:{due_ms // 1000}:{ids[row * 32 : row * 32 + 32]}"
            result = pb.ProduceResult(handle=handle, due_ms=due_ms, id_checked=row in checked)
            results.append(_encoded(result))
        elif (known := errors.get(refusal)) is not None:
            results.append(known)
        else:
            errors[refusal] = _encoded(pb.ProduceResult(error=refusal.as_error()))
            results.append(errors[refusal])
    return b"".join(results)


def _encoded(result: pb.ProduceResult) -> bytes:
    """Encodes one result as a field; a response is the concatenation of its fields."""
    return pb.DelayProduceResponse(results=[result]).SerializeToString()


def column_results(batch: RequestBatch, wheel: WheelId | None) -> bytes:
    """Returns the results of a request of columns: the wheel, and the refused messages."""
    errors: dict[Refusal, pb.Error] = {}
    results = pb.ColumnResults(wheel=str(wheel) if wheel is not None else "")
    for row, refusal in sorted(batch.refusals.items(), key=lambda item: item[0]):
        error = errors.get(refusal)
        if error is None:
            error = errors[refusal] = refusal.as_error()
        results.errors.add(row=row, error=error)
    results.id_checked.extend(row for row in batch.checked if row not in batch.refusals)
    return pb.DelayProduceResponse(columns=results).SerializeToString()
