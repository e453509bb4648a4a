-- How far the trainer's log-probabilities are from the sampler's, over all sampled tokens and in slices.
--
-- Per token: ls = sampler_logprob, lt = old_logprob (the trainer at the step's start), d = lt - ls, r = exp(d). Tokens
-- are sampled by the sampler, so KL(trainer || sampler) needs the weight r; some systems leave that weight out.
-- k1, k2 and k3 are Schulman's estimators; ess and chi2 are those of the importance weights r. In r, d is held within
-- +-20 so that one broken token cannot turn every sum into infinity; logprob_abs_diff_max shows it as it is.
-- Every token with both numbers counts, whatever was masked later, or a mask would hide the mismatch it was made for.
-- A token is flipped if a sparse model's experts on its path are others than the trainer chooses by itself.
-- Only `support` is left out: there the two numbers belong to different distributions by design.
with measured as (
    select
        u.lag, u.turn, u.position, u.flipped, t.cause, t.harness,
        case
            when u.position < 1 then '0'
            when u.position < 16 then '1-15'
            when u.position < 64 then '16-63'
            when u.position < 256 then '64-255'
            else '256+'
        end as place,
        u.position = 0 and t.cause = 'extend' as follows,  -- the first token after a tool's result
        u.sampler_logprob::double as ls,
        u.old_logprob::double as lt,
        isfinite(ls) and isfinite(lt) as finite
    from updates as u
    left join turns as t on t.attempt_id = u.attempt_id and t.turn = u.turn
    where u.sampler_logprob is not null and u.old_logprob is not null and coalesce(u.reason, '') <> 'support'
),
compared as (
    select *, lt - ls as d, exp(least(greatest(lt - ls, -20), 20)) as r from measured
)
select
    case
        when grouping(lag) = 0 then 'lag=' || lag
        when grouping(turn) = 0 then 'turn=' || turn
        when grouping(place) = 0 then 'position=' || place
        when grouping(cause) = 0 then 'cause=' || cause
        when grouping(harness) = 0 then 'harness=' || harness
        when grouping(follows) = 0 then case when follows then 'first=after_tool' end
        when grouping(flipped) = 0 then 'flipped=' || flipped
        else 'all'
    end as slice,
    count(*) as tokens,
    count(*) filter (not finite) as nonfinite,
    corr(exp(lt), exp(ls)) filter (finite) as pearson,
    avg(abs(d)) filter (finite) as logprob_abs_diff_mean,
    quantile_cont(abs(d), 0.5) filter (finite) as logprob_abs_diff_p50,
    quantile_cont(abs(d), 0.99) filter (finite) as logprob_abs_diff_p99,
    max(abs(d)) filter (finite) as logprob_abs_diff_max,
    avg(-d) filter (finite) as k1,
    avg(r - 1 - d) filter (finite) as k3,
    avg(r * d) filter (finite) as k1_reverse,
    avg(1 - r + r * d) filter (finite) as k3_reverse,
    pow(sum(r) filter (finite), 2) / (count(*) filter (finite) * sum(r * r) filter (finite)) as ess,
    avg((r < 0.5 or r > 2)::integer) filter (finite) as ratio_outside,
    avg(r * r) filter (finite) - 1 as chi2
from compared
group by grouping sets ((), (lag), (turn), (place), (cause), (harness), (follows), (flipped))
having slice is not null
order by
    slice <> 'all', grouping(lag, turn, place, cause, harness, follows, flipped), min(lag), min(turn), min(position), slice;
