-- Tries lost to infrastructure against attempts that were kept, and how long each were: losses that depend on length bias
-- what is trained on, and a share of losses that grows with the policy's version is a way out that it has found.
-- A try is an attempt's last one or one of its history; an attempt is kept if its blame is not infra. The version is the
-- newest that sampled for the attempt's last try, `none` where nothing was sampled.
with try as (
    select
        harness, run, step, outcome, blame = 'infra' as lost,
        coalesce(list_max(list_transform(weights, lambda w: w.version))::varchar, 'none') as version,
        turn_count as turns, coalesce(sampled_tokens, 0) as tokens, wall_s
    from trajectories
    union all
    select harness, run, step, t.outcome, t.blame = 'infra', version, t.turns, t.tokens, t.wall_s
    from (
        select
            harness, run, step, unnest(history) as t,
            coalesce(list_max(list_transform(weights, lambda w: w.version))::varchar, 'none') as version
        from trajectories
    )
)
select
    case
        when grouping(harness) = 0 then 'harness=' || harness
        when grouping(run) = 0 then 'round=' || run || '.' || step
        when grouping(version) = 0 then 'version=' || version
        when grouping(outcome) = 0 then 'outcome=' || outcome
        else 'all'
    end as slice,
    count(*) filter (not lost) as kept,
    count(*) filter (lost) as lost,
    avg(lost::integer) as lost_share,
    avg(turns) filter (not lost) as kept_turns,
    avg(turns) filter (lost) as lost_turns,
    avg(tokens) filter (not lost) as kept_tokens,
    avg(tokens) filter (lost) as lost_tokens,
    avg(wall_s) filter (not lost) as kept_wall_s,
    avg(wall_s) filter (lost) as lost_wall_s
from try
group by grouping sets ((), (harness), (run, step), (version), (outcome))
having count(*) > 0
order by slice <> 'all', grouping(harness, run, version, outcome), slice;
