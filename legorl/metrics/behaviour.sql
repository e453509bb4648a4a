-- What the policy does: turns, tools, tokens, branches; over all attempts not lost to infrastructure, by harness and by round.
-- A turn is text only if the harness got no tool call from it; a branch is a turn that does not extend its parent whole.
with attempt as (select * from trajectories where blame <> 'infra'),
turn as (
    select t.* exclude (logprobs, context_ids, completion_ids, messages, tools), len(t.tool_calls) as calls, len(list_filter(t.tool_calls, lambda c: c.valid)) as valid_calls
    from turns as t semi join attempt using (attempt_id)
),
per_attempt as (
    select
        coalesce('harness=' || harness, 'round=' || run || '.' || step, 'all') as slice,
        count(*) as attempts,
        avg(turn_count) as turns_per_attempt,
        avg(sampled_tokens) as sampled_tokens_per_attempt,
        avg(wall_s) as wall_s,
        avg((octet_length(patch) = 0)::integer) as empty_patch_rate
    from attempt group by grouping sets ((), (harness), (run, step))
),
per_turn as (
    select
        coalesce('harness=' || harness, 'round=' || run || '.' || step, 'all') as slice,
        avg(completion_tokens) as sampled_tokens_per_turn,
        avg(prompt_tokens) as prompt_tokens_per_turn,
        avg(mean_logprob) as mean_logprob,
        avg((calls = 0)::integer) as text_only_rate,
        sum(calls) / count(*) as tool_calls_per_turn,
        sum(valid_calls) / nullif(sum(calls), 0) as tool_call_valid_rate,
        avg((finish_reason = 'length')::integer) as cut_by_length_rate,
        avg((cause not in ('root', 'extend'))::integer) as branch_rate,
        sum(cached_tokens) / nullif(sum(prompt_tokens) filter (cached_tokens is not null), 0) as cached_prompt_rate
    from turn group by grouping sets ((), (harness), (run, step))
)
select * from per_attempt left join per_turn using (slice) where attempts > 0
order by slice <> 'all', slice;
