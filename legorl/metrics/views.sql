-- The views that every question is asked of. Beneath them lie three tables as they stand in the files, one row an
-- attempt already chosen: `trajectory_rows`, `update_rows`, `metric_rows` (legorl.schema TRAJECTORY, UPDATE, METRIC).

create view trajectories as
select
    * exclude (turns),
    len(turns)::integer as turn_count,
    list_sum(list_transform(turns, lambda t: len(t.completion_ids)))::bigint as sampled_tokens
from trajectory_rows;

create view turns as
with unnested as (
    select attempt_id, group_id, run, step, task_id, harness, unnest(turns) as t from trajectory_rows
)
select
    attempt_id, group_id, run, step, task_id, harness,
    t."index" as turn,
    t.parent, t.prefix_len, t.cause,
    (t.prefix_len + len(t.context_ids))::integer as prompt_tokens,
    len(t.context_ids)::integer as new_tokens,
    len(t.completion_ids)::integer as completion_tokens,
    list_avg(t.logprobs) as mean_logprob,
    list_min(list_transform(t.versions, lambda v: v.version)) as version,
    t.context_ids, t.completion_ids, t.logprobs, t.temperature, t.support, t.versions,
    t.request_id, t.request_digest, t.protocol, t.streamed, t.delivered, t.requested, t.applied,
    t.finish_reason, t.stop_token_sampled, t.tool_calls, t.text, t.reasoning, t.messages, t.tools,
    t.started_at, t.queue_s, t.prefill_s, t.decode_s, t.cached_tokens, t."foreign", t.drops, t.routing
from unnested;

create view tokens as
with unnested as (
    select
        attempt_id, run, step, turn, versions, drops,
        unnest(range(len(completion_ids)))::integer as position,
        unnest(completion_ids) as token,
        unnest(logprobs) as logprob
    from turns
)
select
    attempt_id, run, step, turn, position, token, logprob,
    list_filter(versions, lambda v: v.start <= position and position < v.start + v.length)[1].version as version,
    list_filter(drops, lambda d: d.start <= position and position < d.start + d.length)[1].reason as drop_reason
from unnested;

create view tests as
with unnested as (select attempt_id, run, step, task_id, unnest(tests) as t from trajectory_rows)
select attempt_id, run, step, task_id, t.id, t.wanted, t.got from unnested;

create view updates as from update_rows;

create view metrics as from metric_rows;
