"""The Arrow schemas of every file that stages exchange, and their version.

`TRAJECTORY` is one row an attempt (DESIGN section 4), `UPDATE` one row a sampled token of a training step, `METRIC`
one row a number. Column names change only together with the format string. Readers refuse other formats.

Token columns: ids are int32, log-probabilities float32, times float32 seconds, instants UTC microseconds.
"""

import pyarrow as pa

TRAJECTORY_FORMAT = "trajectory/1"
UPDATE_FORMAT = "update/2"
UPDATE_1_FORMAT = "update/1"  # without `flipped`; still read
METRIC_FORMAT = "metric/1"

STAMP = pa.timestamp("us", tz="UTC")


def _struct(**fields: pa.DataType) -> pa.DataType:
    return pa.struct([pa.field(name, kind) for name, kind in fields.items()])


SPAN_VERSION = _struct(start=pa.int32(), length=pa.int32(), version=pa.int32())
SPAN_DROP = _struct(start=pa.int32(), length=pa.int32(), reason=pa.string())
TOOL_CALL = _struct(id=pa.string(), name=pa.string(), arguments=pa.string(), valid=pa.bool_())
# Sparse MoE. `data`: rows x layers x topk expert ids in C order as `dtype` (uint8, uint16); `valid`: one byte a row.
ROUTING = _struct(
    data=pa.binary(), dtype=pa.string(), rows=pa.int32(), layers=pa.int32(), topk=pa.int32(), valid=pa.binary()
)

TURN = _struct(
    index=pa.int32(),
    parent=pa.int32(),
    prefix_len=pa.int32(),
    cause=pa.string(),
    context_ids=pa.list_(pa.int32()),
    completion_ids=pa.list_(pa.int32()),
    logprobs=pa.list_(pa.float32()),
    temperature=pa.float32(),
    support=pa.string(),
    versions=pa.list_(SPAN_VERSION),
    routing=ROUTING,
    request_id=pa.string(),
    request_digest=pa.string(),
    protocol=pa.string(),
    streamed=pa.bool_(),
    delivered=pa.bool_(),
    requested=pa.string(),
    applied=pa.string(),
    finish_reason=pa.string(),
    stop_token_sampled=pa.bool_(),
    tool_calls=pa.list_(TOOL_CALL),
    text=pa.string(),
    reasoning=pa.string(),
    messages=pa.string(),
    tools=pa.string(),
    started_at=STAMP,
    queue_s=pa.float32(),
    prefill_s=pa.float32(),
    decode_s=pa.float32(),
    cached_tokens=pa.int32(),
    foreign=pa.bool_(),
    drops=pa.list_(SPAN_DROP),
)

WEIGHTS = _struct(version=pa.int32(), digest=pa.string(), path=pa.string())
BUDGET = _struct(limit=pa.float64(), used=pa.float64())
BUDGETS = _struct(turns=BUDGET, tokens=BUDGET, seconds=BUDGET)
COUNT = _struct(passed=pa.int32(), total=pa.int32())
TEST = _struct(id=pa.string(), wanted=pa.string(), got=pa.string())
TRY = pa.struct(
    [
        pa.field("try", pa.int32()),
        pa.field("outcome", pa.string()),
        pa.field("blame", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("turns", pa.int32()),
        pa.field("tokens", pa.int32()),
        pa.field("wall_s", pa.float32()),
    ]
)

TRAJECTORY = pa.schema(
    [
        # identity
        ("attempt_id", pa.string()),
        ("group_id", pa.string()),
        ("run", pa.string()),
        ("step", pa.int32()),
        ("task_id", pa.string()),
        ("task_path", pa.string()),
        ("task_digest", pa.string()),
        ("split", pa.string()),
        ("attempt", pa.int32()),
        ("try", pa.int32()),
        ("harness", pa.string()),
        ("harness_version", pa.string()),
        ("harness_digest", pa.string()),
        ("model", pa.string()),
        ("weights", pa.list_(WEIGHTS)),
        ("tokenizer_digest", pa.string()),
        ("template_digest", pa.string()),
        ("seed", pa.int64()),
        # verdict
        ("outcome", pa.string()),
        ("blame", pa.string()),
        ("detail", pa.string()),
        ("exit_code", pa.int32()),
        ("budgets", BUDGETS),
        ("history", pa.list_(TRY)),
        # times
        ("started_at", STAMP),
        ("wall_s", pa.float32()),
        ("setup_s", pa.float32()),
        ("harness_s", pa.float32()),
        ("engine_s", pa.float32()),
        ("queue_s", pa.float32()),
        ("collect_s", pa.float32()),
        # result
        ("patch", pa.binary()),
        ("patch_files", pa.list_(pa.string())),
        ("log_tail", pa.string()),
        # grade: null until lego-grade has been here
        ("reward", pa.float32()),
        ("resolved", pa.bool_()),
        ("fail_to_pass", COUNT),
        ("pass_to_pass", COUNT),
        ("tests", pa.list_(TEST)),
        ("flags", pa.list_(pa.string())),
        ("grader", pa.string()),
        ("graded_at", STAMP),
        ("grade_s", pa.float32()),
        # the conversation tree
        ("turns", pa.list_(TURN)),
    ]
)

GRADE_COLUMNS = (
    "reward", "resolved", "fail_to_pass", "pass_to_pass", "tests", "flags", "grader", "graded_at", "grade_s",
)  # fmt: skip

UPDATE = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int32()),
        ("digest_in", pa.string()),
        ("digest_out", pa.string()),
        ("attempt_id", pa.string()),
        ("turn", pa.int32()),
        ("position", pa.int32()),  # index within the turn's completion_ids
        ("token", pa.int32()),
        ("train_logprob", pa.float32()),  # trainer, weights of the token's minibatch; null if dropped
        ("old_logprob", pa.float32()),  # trainer, weights at the step's start; null if not computed
        ("sampler_logprob", pa.float32()),
        ("ratio", pa.float32()),
        ("weight", pa.float32()),
        ("advantage", pa.float32()),
        ("clipped", pa.bool_()),
        ("lag", pa.int32()),
        ("flipped", pa.bool_()),  # sparse MoE: a route on its path is not the trainer's own; null if none is recorded
        ("reason", pa.string()),  # legorl.outcomes: `trained` or why not
    ]
)

METRIC = pa.schema([("run", pa.string()), ("step", pa.int32()), ("name", pa.string()), ("value", pa.float64())])

SCHEMAS = {
    TRAJECTORY_FORMAT: TRAJECTORY,
    UPDATE_FORMAT: UPDATE,
    UPDATE_1_FORMAT: pa.schema([field for field in UPDATE if field.name != "flipped"]),
    METRIC_FORMAT: METRIC,
}
