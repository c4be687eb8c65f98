"""The thresholds of the detectors and of the verdict, in one frozen object, with derivations.

What decides whether something is said, and what, is here. Beside the code are: how a quantity is
measured (the steps that a table looks at, floors that keep a division finite), what bounds memory
or the length of a text, and the confidence that a finding states, with its reason. The hash of the
object is stored in every finding: a changed threshold is a visible change.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from functools import cached_property


@dataclasses.dataclass(frozen=True)
class Policy:
    """Thresholds. Shares are 0-1, ratios of times are given as logarithms where named `ln_`."""

    # --- cost: what is worth a person's attention -----------------------------------------
    # Below 1 % of job throughput a change drowns in the drift of a healthy job (CV of the median
    # step from run to run 0.13 %, p90 0.64 %); below 2 % it is not acted on.
    cost_silent_ratio: float = 0.01
    cost_info_ratio: float = 0.02
    cost_critical_ratio: float = 0.10  # a tenth of a cluster is worth a page at night
    cost_keep_share: float = 0.75  # of the level that it has reached: estimates scatter

    # --- straggler ------------------------------------------------------------------------
    # A peer comparison needs the median to survive one bad member: three others.
    min_role_size: int = 4
    # First steps hold allocation, compilation, cold caches; the rest of the warm-up ends when
    # three steps in a row agree within 10 %, and is cut where a noisy host never does.
    warmup_steps: int = 5
    warmup_max_steps: int = 20
    warmup_agree_ratio: float = 0.10
    # The answer "healthy" and any accusation need two transient windows beyond the warm-up.
    min_steps: int = 20
    # A rank's own reference: as short as possible, so that a fault seldom falls into it, and
    # long enough that its median scatters by sigma * 1.25 / sqrt(30) = 0.23 sigma.
    baseline_steps: int = 30
    baseline_min_steps: int = 15
    # Rolling medians: transient and persistent.
    short_window: int = 5
    long_window: int = 20
    ln_entry_floor: float = math.log(1.08)  # under the entry level that follows from noise
    leave_share: float = 0.5  # of that level
    # For the scatter of a rank: enough for a stable MAD, recent enough to follow the machine.
    scatter_steps: int = 512
    # Stretches at most one long window apart are one episode if they are about equally bad.
    same_size_share: float = 0.6
    # Stretches of one rank recur from the third on, or where each would be accused alone; not where
    # one is most of the time. They are not over while they cost enough of so many newest steps,
    # twice those that give a cost.
    recurring_least: int = 3
    recurring_most_share: float = 0.6
    recurring_steps: int = 1024
    # Half of a role, each slow for a while in turn, are no faults that come and go: work moves
    # between them. One that is slow for twice as long as any of these turns is one.
    turns_share: float = 0.5
    turns_longest: float = 2.0
    min_episode_steps: int = 3  # shorter events are dropped
    # An accusation above info needs one long window of bad steps *and* this much time: bursts of
    # other work on a shared host hit one rank for seconds, and two of them may follow each other.
    persistent_steps: int = 20
    persistent_seconds: float = 15.0
    # More steps in less time suffice where the excess is far above the noise. Measured on 4 ranks
    # sharing 2 cores: episodes of healthy ranks reach 1.6 entry levels, one slowed by +60 % 6 to 7.
    clear_steps: int = 50
    clear_seconds: float = 8.0
    clear_strength: float = 4.0
    # A rank at least so many times slower needs few steps: twenty of them might take minutes.
    huge_ratio: float = 3.0
    huge_steps: int = 5
    # Share of an episode's steps that must each be bad by half its size. A rank that is
    # slow is slow in every step (measured: 0.99); bursts and hiccups raise the mean.
    consistent_share: float = 0.80
    short_chance: float = 0.01  # that a recording of few steps looks so without a slow rank
    short_share: float = 0.80  # of its steps: in these a slow rank is slower than all others
    short_steps: int = 3  # of a recording, for the share of a step that waits for data
    recent_steps: int = 100  # the newest, in which missing data and a slow rank count
    max_missing_share: float = 0.30  # of them: no conclusion beyond
    # Onsets of more ranks than this at once are global, no rank is accused.
    global_share: float = 0.25
    peers_share: float = 0.5  # the same of ranks with peers: the median must be none of them
    company_ratio: float = 1.2  # self time / reference of a rank that slower ones hide
    # Cost and phases of a long episode are those of its last steps: what it costs now.
    cost_steps: int = 512
    # Steps before the onset that give the time of a healthy step. The last ones, because a shared
    # host drifts, and three times as many, because of bursts; of both the lower time counts.
    healthy_steps: int = 40
    healthy_long_steps: int = 120
    healthy_min_steps: int = 10
    min_explained_share: float = 0.5  # of the excess, by the sum of the phases that hold it
    # Of the excess of a rank, or of its rise, each of the others waits the larger part: they wait
    # for it, and not for something else.
    waited_share: float = 0.5
    as_before_share: float = 0.25  # of the rise of the slow ones, that the others have at most
    # Of what a phase is longer so much is left in the whole step: else another phase is shorter and
    # the rank is no slower. Not all, as other slow ranks hide a part.
    whole_share: float = 0.25
    # The larger part decides: of an episode, that one of another rank covers; of the excess, that
    # is waiting for data, or in none of the phases that compute.
    company_share: float = 0.5
    kind_share: float = 0.5
    script_share: float = 0.5
    alike_ratio: float = 1.2  # the largest of several ranks' ratios over the least: said as one
    # Of the excess: a phase with less is no evidence, and one with at most so much is ruled out.
    evidence_share: float = 0.02
    ruled_out_share: float = 0.1
    # Where devices report some steps only: on average so much off their neighbours they are unlike
    # the others (the script logs or saves in them), and say nothing of these.
    sampled_unlike_ratio: float = 1.1

    # --- straggler: stacks ---------------------------------------------------------------
    # Of each of both ranks: three that differ in all are so by chance in one case of 20.
    stacks_least: int = 4
    stacks_share: float = 0.25  # that the shares of stacks which show a function differ by
    stacks_chance: float = 0.05  # that as large a difference comes about by chance

    # --- stalls: some steps only ----------------------------------------------------------
    stall_steps: int = 512  # the newest; fewer do not show how often a rank stalls
    # From a fifth over its reference, or 3 sigma of the rank's steps; chance shows on other ranks.
    ln_stall_floor: float = math.log(1.2)
    stall_sigmas: float = 3.0
    # Two stalls are an event, and one bad minute says nothing of a rank: so many, with steps
    # between.
    stall_least: int = 6
    stall_multiple: float = 3.0  # of the worst of the others: ranks of one host stall together
    # Above info without a second signal: stalls of 2.5 times the reference alone stand out (other
    # work takes a rank to 1.6 times, see above), which none did in 1,200 simulated healthy runs.
    ln_stall_clear: float = math.log(2.5)
    # So few of these as six are enough where they are spread over 150 steps and fall on one rank by
    # chance in one of so many jobs; a stall of many steps' length costs much seldom as it comes.
    stall_chance: float = 1e-4
    stall_rare_steps: int = 2048
    # Or smaller ones are a tenth of 150 steps or more, all over them, and eight times the others'
    # worst: of 2,700 such runs four reach that in 100 steps, none in 150.
    stall_sure_steps: int = 150
    stall_sure_share: float = 0.1
    stall_sure_multiple: float = 8.0
    limit_step_ratio: float = 2.0  # of a rank's median step: one that a limit held up
    # The larger part decides: pauses hold most of the extra time; a rank that stalls in more of its
    # steps is slow, not stalling, as its median step is a stall; one stretch that holds more of the
    # stalled time is an episode; and between stalls its steps are nearer to usual ones.
    stall_pause_share: float = 0.5
    stall_most_share: float = 0.5
    stall_episode_share: float = 0.5
    stall_between_share: float = 0.5
    pause_share: float = 0.05  # of a step; pauses of the collector are measured, not guessed

    # --- balance: unequal since the first step ---------------------------------------------
    # Means of ten equal parts of a run are nearly independent, however steps follow each other, and
    # few enough that each is long (batch means). Of equal ranks the means of ten parts differ by
    # 6.6 standard errors in one case of 10,000 (Student's t, nine degrees of freedom).
    unequal_parts: int = 10
    unequal_t: float = 6.6
    unequal_steps: int = 200  # twenty in each part, where they differ by less than `company_ratio`
    # Of a role: fewer quick ones are less to do for these, not a level that others should reach.
    unequal_quick_share: float = 0.25

    # Of ranks whose steps scatter by s the longest of n works about s * sqrt(2 ln n) more than the
    # middle one: 3 % with 8 ranks of 2 %, 7 % with 1,024. A tenth is more than such ranks lose.
    uneven_share: float = 0.10
    uneven_most: float = 0.8  # of what is lost: where half of the ranks hold it, they are said

    # --- straggler: a second signal ------------------------------------------------------
    # A clock 7 % below that of its peers is beyond the spread of healthy GPUs of one kind, which
    # run at the same clock or one step (15 MHz of about 1,700) apart.
    low_clock_ratio: float = 0.93
    switches_ratio: float = 3.0  # of the reference's switches and faults, whose counts are skewed
    min_switches: float = 5.0
    min_major_faults: float = 1.0
    pinned_share: float = 0.5  # of the processors that it might use before, or its peers may
    # CPU time per step within 15 %: the rank does not compute more.
    same_cpu_ratio: float = 1.15

    # --- hang -----------------------------------------------------------------------------
    # An operation is late after 3 x its p99. The floor is 2 s plus the second that a
    # state may be old, which leaves the 10 s to a named culprit three reports of slack.
    hang_p99_multiple: float = 3.0
    # A rank may also compute for a whole slow step. Of steps the p95 counts: they are few, and
    # the p99 of a hundred steps is the one that hung before.
    slow_step_share: float = 0.95
    hang_floor_seconds: float = 3.0
    hang_recent_steps: int = 256  # whose slowest give the time that a step may take
    hang_seen_steps: int = 3  # before it stopped, with rows of a rank: its calls are not being lost
    # Yet never so late that a p99 spoilt by an earlier stall hides the next one.
    hang_ceiling_seconds: float = 120.0
    # Before a rank has ended its first step: imports, data sets, compilation.
    hang_startup_seconds: float = 30.0
    # While the root writes a checkpoint or evaluates.
    hang_special_seconds: float = 60.0
    # All members entered and nothing moves: bytes may still flow, so wait longer.
    hang_transfer_seconds: float = 10.0
    # A rank whose node collector says nothing for so long counts as silent (ten reports).
    silent_seconds: float = 10.0

    # --- desync ---------------------------------------------------------------------------
    # A chunk of a rank is sent after some seconds, and what was sent again after an outage comes
    # 5 s late: what was not said by then, in the time of those who did say it, is lost.
    desync_wait_seconds: float = 10.0
    # What breaks off because of a wrong call does so at once (gloo: 0.01-0.3 s) or when its
    # victims are seen to wait; both orders of clocks and looks allowed for.
    desync_echo_seconds: float = 60.0
    # Calls that must be equal again after one that was skipped or inserted: one or two are so by
    # chance where layers are alike.
    desync_equal_calls: int = 4
    desync_most_edits: int = 3  # more than that is another program, not a slip

    # --- clocks ---------------------------------------------------------------------------
    # Two clocks without a time service run apart by the error of their crystals: +-50 ppm
    # each, so 100 ppm is what an offset may change by before a clock was set.
    clock_drift_ratio: float = 100e-6
    # Hosts under a time service agree within a millisecond or two on a local network. Ten is
    # what begins to show in the order of log lines; a second is what breaks tokens and leases.
    clock_report_ms: float = 10.0
    clock_warn_ms: float = 1000.0

    # --- root cause -----------------------------------------------------------------------
    # Failures on two hosts within this band have no order: clocks under time service are closer.
    clock_band_seconds: float = 0.5
    # On one host the order is known but for the reaction time of the reporter.
    same_host_band_seconds: float = 0.02
    # Signals that end most of the job within this time are one action from outside.
    stop_band_seconds: float = 60.0
    # Who stops a job gives it time before it kills what stays: docker stop 10 s, torchrun, Slurm
    # and Kubernetes 30 s. Half of the shortest.
    kill_grace_seconds: float = 5.0
    # What a rank prints before its end may be its cause: a watchdog of NCCL waits up to a minute
    # for others to dump before it aborts. Pipes are read for some seconds after the end.
    last_words_seconds: float = 120.0
    last_words_after_seconds: float = 10.0
    last_line_seconds: float = 2.0  # where a launcher passed it on: longer, and it is another's
    # A job that regroups waits for a rank as long as its time-out of a collective, of some seconds,
    # twice; until then one that ended is not taken for the end of the job.
    regroup_seconds: float = 60.0
    # An error on at most this share of the ranks is rare: one node of 8 in a job of 64. Echoes
    # come from all but the culprit, so that any share well below a half would do.
    rare_ratio: float = 0.125

    # Points of a failure, of which the highest is named. What it is by itself comes first: one that
    # begins by itself has at least as many as an echo with either sign of the next two, and two
    # signs outweigh it. An end of which no error was seen is between both.
    blame_begins: int = 3
    blame_weak: int = 2
    blame_echo: int = 1
    blame_stopped: int = 0  # by others, or from outside
    # Seen by others: they waited for it, or it called something else. Seen in its end: a deadly
    # signal, or it left first. Each turns an echo into one that began, and neither alone more.
    blame_at_fault: int = 2
    blame_ended: int = 2
    # Half as much: few have the error, it is the earliest as far as clocks show. Both are so by
    # chance where two failures have nothing to do with each other.
    blame_rare: int = 1
    blame_earliest: int = 1

    # --- replay ---------------------------------------------------------------------------
    # Steps that one replay covers: the same steps are on both sides of every what-if, so noise
    # cancels, and the mean of 64 settles to an eighth of a step's scatter. A new one is made when
    # half of them is new.
    replay_steps: int = 64
    replay_min_steps: int = 10
    # A model of who waits for whom must give back what was recorded.
    replay_error_ratio: float = 0.02
    # Hooks see a little less of a wait than the step clock; a tenth of it may be elsewhere.
    replay_blocked_ratio: float = 0.10

    # --- pipeline -------------------------------------------------------------------------
    # Below 5 % of the span an uneven split is not worth a change of the model's code.
    imbalance_ratio: float = 0.05
    # Without a replay: a stage a tenth above the others, beyond how layers scatter.
    uneven_stage_ratio: float = 1.10
    stage_steps: int = 8  # the schedule is the same in each: its idle share needs few
    steady_stage_share: float = 0.8  # of the steps, in which the same stage is the slowest
    # Of the schedule's idle share, or of a step that stages fill: ranks that share processors work
    # a little longer at once.
    schedule_share: float = 0.9
    # A pipeline that idles a third by its schedule has less than 2 (p - 1) microbatches. At a
    # tenth, 9 (p - 1) of them, twice as many would gain 5 %, and lose some of it in smaller
    # kernels: two stages on real ranks gained 3 % by 18 in place of 9.
    bubble_share: float = 1 / 3
    bubble_goal: float = 0.10

    # --- communication --------------------------------------------------------------------
    # A step is communication-bound where more than a fifth of it is exposed.
    exposed_ratio: float = 0.20
    # Of the step: data wait, and self time, beyond which they bound it.
    data_bound_ratio: float = 0.10
    compute_bound_ratio: float = 0.85
    # Below 1 MB latency rules, and a group seen less than 50 times has no usual time.
    min_message_bytes: int = 1 << 20
    min_group_seen: int = 50
    # Bus bandwidth is measured on messages that fill a link; 70 % of the best 5 % seen.
    busbw_message_bytes: int = 16 << 20
    busbw_ratio: float = 0.70
    busbw_best_share: float = 0.05
    # A change of settings below 3 % is not worth advice.
    advice_gain: float = 0.03
    # A prediction is given with at least so much to each side: a share of it, or points of
    # throughput. Simulation, 100 random jobs with 63 pieces of advice: median error 0.8 % of the
    # gain, two beyond 20 % (3.9 % for 2.5 %, 4.9 % for 3.6 %), the sign always right.
    advice_band: float = 0.20
    advice_band_points: float = 0.015
    # Casts between float32 and bfloat16, by bytes of float32. Measured on one core: 5.2 GB/s
    # (float16 only 0.9, so bfloat16 is advised). What pays with it pays all the more on a GPU.
    cast_bytes_per_second: float = 4e9

    # --- drift ----------------------------------------------------------------------------
    # A difference on exactly the ranks in trouble counts for more: one in a hundred.
    drift_fisher_p: float = 0.01
    # Ranks that follow one rule before another can break it: through two any line goes.
    drift_rule_ranks: int = 3
    drift_agreed_share: float = 0.75  # of the ranks, that agree where they are the usual ones

    # --- numbers of training --------------------------------------------------------------
    # A loss scaler overflows by design when it probes a larger scale; six in a row halve it 64
    # times more than probing does.
    max_skipped_overflows: int = 5
    # Spikes are compared with the last 200 recorded values, after 50 of them: the MAD of
    # 50 values is right within 15 %.
    spike_window: int = 200
    spike_min_history: int = 50
    # ln of the gradient norm is near normal; 8 sigma also covers its heavier tail.
    spike_norm_z: float = 8.0
    # Losses: three values in a row beyond 6 sigma.
    spike_loss_z: float = 6.0
    spike_loss_values: int = 3
    # A spike that is still on after so many recorded values does not recover by itself.
    divergence_values: int = 20
    # One rank against the others: at least so many values of a healthy rank before it is compared,
    # and so many outliers before it is more than one odd batch.
    outlier_min_history: int = 20
    outlier_repeats: int = 3
    # And beyond what any other rank reached: of equal tails the largest of three ranks is beyond
    # half as much again as that of the others in one case of some hundred.
    outlier_tail_multiple: float = 1.5
    # One odd batch alone is reported from here on: batches of healthy ranks differ by a tenth in
    # their loss (2 of 45 runs of the reference trainer had one that z alone would report, at 1.1
    # times).
    outlier_min_ratio: float = 1.25
    # The newest values in which outliers are looked for: at one sample in 16 steps, the last
    # thousand steps.
    outlier_window: int = 64
    # Floors under a scatter: less than 1 % of a norm or 0.2 % of a loss does not matter.
    ln_norm_sigma_floor: float = 0.01
    loss_sigma_floor: float = 0.002

    # Exactly 0, or equal to the last bit, so often is no chance: in single steps a gradient may
    # underflow. Norms are sampled each 16th step, losses in every one that is not too short.
    zero_norm_values: int = 5
    zero_norm_steps: int = 20
    constant_loss_values: int = 20
    # Goyal et al. 2017 (arXiv 1706.02677) warm minibatches of 8,192 images up; an eighth of that is
    # chosen, not derived: it is advice.
    warm_up_batch: int = 1024
    warm_up_values: int = 10
    # A rate that grew by less was perhaps tuned.
    scaled_times: float = 1.5
    # Batches that published rates are for: Goyal et al. 2017 (arXiv 1706.02677), and Touvron et al.
    # 2020 (DeiT, arXiv 2012.12877).
    usual_batches: tuple[int, ...] = (256, 512)
    # Steps that a rank is behind which leaves updates out: one unfinished step may accumulate
    # gradients over some backward passes.
    skipped_update_steps: int = 10

    # --- memory ---------------------------------------------------------------------------
    # The allocator fills its caches in the first steps.
    memory_skip_steps: int = 50
    # Growth below 16 MiB is within what allocators round and cache.
    memory_least_bytes: float = 16 * 2**20
    memory_over_steps: int = 200
    # One false alarm in a thousand series without a trend; half of 24 points still lets
    # Mann-Kendall reach it (10 do).
    memory_trend_p: float = 1e-3
    memory_min_points: int = 24
    memory_file_share: float = 0.75  # of the growth: pages of files are no leak
    # A forecast is worth a warning when there is time to act but not to wait.
    oom_warning_steps: float = 2000.0
    oom_warning_seconds: float = 7200.0
    oom_critical_seconds: float = 900.0  # about a save and a restart
    # A forecast reaches no further than ten times what was seen: a cache that begins to fill
    # looks like a leak.
    oom_reach: float = 10.0
    # Held by the allocator and used by no tensor, as a share of the GPU.
    fragmentation_share: float = 0.30
    fragmentation_held_share: float = 0.9  # of the limit: what comes next may not fit
    # Whatever part of it are activations, twice the microbatch takes at most twice the memory: up
    # to half of a device it fits for sure.
    unused_memory_share: float = 0.5
    unused_memory_steps: int = 200  # by then there was a checkpoint or a validation in most jobs

    # --- waiting for data -----------------------------------------------------------------
    # Shares of the step that are lost to it.
    data_info_share: float = 0.05
    data_warning_share: float = 0.10
    data_steps: int = 512
    # A wait below a quarter of a step is no spike, however quiet the rest is.
    data_spike_share: float = 0.25
    # One or two long waits are events, for example a hang that ended; they say nothing of a loader.
    data_min_spikes: int = 3
    # A tenth of all processor time spent waiting for disks: reading is the limit.
    iowait_share: float = 0.10
    # Loader workers that use so much of their cores have no time left.
    workers_busy_share: float = 0.90
    # Waits are those of at most a quarter of the ranks if at most a quarter of the loss is left
    # without them; of these the guilty ones have a quarter of the largest excess.
    data_ranks_share: float = 0.25
    data_rest_share: float = 0.25
    data_guilty_share: float = 0.25
    # Spikes are far above the median wait, hold most of all waiting, and are the fewer steps.
    data_spike_ratio: float = 5.0
    data_spikes_share: float = 0.7
    data_spike_steps_share: float = 0.5
    # Spikes are at an even distance if most gaps are the same, within a batch that came late. One
    # gap alone must be a long one: short ones are alike by chance.
    data_gap_share: float = 0.02
    data_even_share: float = 0.75
    data_far_steps: int = 20

    # Equal to the last bit in so many steps, on all ranks: two float32 losses of other samples are
    # equal in one of some hundred thousand steps. Norms are sampled each 16th step.
    same_loss_steps: int = 5
    same_norm_steps: int = 3
    # A pass that began again sooner was a trial of the loader, not an epoch.
    pass_min_steps: int = 4

    # --- GPUs -----------------------------------------------------------------------------
    # One finding per GPU, code and ten minutes; channels that end up to a minute after another
    # Xid are its echo.
    xid_burst_seconds: float = 600.0
    xid_echo_seconds: float = 60.0
    xid_same_seconds: float = 5.0  # NVML and the kernel log report one event so close to each other
    # Held down for more than 5 % of 5 min, and 5 % below the peers' clock: single samples
    # of a bit are common, and clocks of healthy GPUs differ by 1 to 2 %.
    throttle_seconds: float = 300.0
    throttle_share: float = 0.05
    throttle_clock_share: float = 0.05
    throttle_min_stretches: int = 6  # a minute of work: a job that starts draws power in bursts
    gpu_idle_ratio: float = 0.05
    # Corrected errors: ten times the peers', and more than ten.
    ecc_rate_multiple: float = 10.0
    # Little to do over ten minutes: below a third, most of the time is not computing.
    low_activity_seconds: float = 600.0
    low_activity_ratio: float = 0.30
    # Far from the fleet on two metrics, three times in a row.
    fleet_z: float = 6.0
    fleet_stretches: int = 3
    fleet_min_gpus: int = 8

    # --- statistical efficiency, staleness ------------------------------------------------
    noise_min_steps: int = 200
    # Samples that the estimate rests on: it moves over a run, so the newest.
    noise_window: int = 256
    # A standard error of ln B_noise beyond this is a factor of two at 90 %: not worth telling.
    noise_max_error: float = 0.42
    # Zones of B / B_noise, and by how much predictions are off either way.
    noise_free_ratio: float = 0.3
    noise_waste_ratio: float = 3.0
    noise_error_factor: float = 2.0
    # A shard with more than twice its share of requests is hot.
    hot_shard_multiple: float = 2.0
    uneven_shards_ratio: float = 1.2  # of the largest shard, over its fair share of the bytes
    # Of w equal workers each applies w - 1 updates between reading and writing of another one.
    stale_mean_multiple: float = 2.0
    correlated_values: int = 30  # a correlation of none is within 0.18 (1 / sqrt(30))

    # --- goodput, checkpoints -------------------------------------------------------------
    # A ledger is reported of runs that lasted ten minutes, else start-up is most of it; and of
    # those that were started again.
    ledger_min_seconds: float = 60.0
    ledger_reported_seconds: float = 600.0
    # From three failures on a run's own rate says more than another cluster's.
    own_failures: int = 3
    # Detect, restart and reload where this run never did it.
    restart_seconds: float = 300.0
    # One failure may be chance. Two in a row of the same rank, or by the same error, are not.
    loop_attempts: int = 2
    # Of saves the last few are compared with those before; twice is another disk.
    recent_saves: int = 3
    slow_save_ratio: float = 2.0
    # A tenth of the time in saves, as for waiting for data.
    save_warning_share: float = 0.10

    # --- regression -----------------------------------------------------------------------
    steady_steps: int = 30
    baseline_runs: int = 10
    # Calibrated on repeats of identical configurations: 2 %, and what one more run of n
    # exceeds by chance in 2 % of cases where runs scatter more: t of n - 1 degrees of freedom times
    # sqrt(1 + 1/n). With ten runs that is 2.5 sigma, with five 3.3. Simulation of 40,000 runs whose
    # CV has a median of 0.13 % and a p90 of 0.64 %, against a fixed 3 sigma: false alarms 0.13 %
    # for 0.07 %, recall of 3 % 95.5 % for 94.5 %; the bar is 0.5 % and 95 %.
    regression_share: float = 0.02
    regression_t: tuple[float, ...] = (
        15.89, 4.849, 3.482, 2.999, 2.757, 2.612, 2.517, 2.449, 2.398,
    )  # fmt: skip  # 98 % quantiles of Student's t for 1 to 9 degrees of freedom
    regression_one_run: float = 0.05
    regression_p: float = 1e-3
    # Below four runs a standard deviation may be small by chance: 3 % with three, 4 % with two.
    regression_min_runs: int = 4
    # Within a run, far out of how blocks scatter: the load of a shared host wanders by itself.
    slowdown_block: int = 40
    slowdown_share: float = 0.03
    slowdown_side_blocks: int = 3
    slowdown_sigmas: float = 4.0
    slowdown_clear_sigmas: float = 6.0
    # Other work on a shared host comes and ends within a minute or two.
    slowdown_seconds: float = 120.0
    slowdown_before_blocks: int = 2  # how the job was
    slowdown_near_steps: int = 200  # on each side of the change, that are compared
    tokens_least_steps: int = 12  # on each side: fewer are no sample of how long batches are
    # A job that is so much slower for so long is not healthy, whatever the reason.
    rise_block: int = 10
    rise_block_seconds: float = 2.0
    rise_ratio: float = 1.3
    rise_seconds: float = 15.0

    # --- stopped processes: a process that works is never in that state -------------------
    stopped_least: int = 2  # one may be a tool that looks at a process for a moment
    stopped_series_seconds: float = 300.0  # closer stops are one incident
    stopped_span_seconds: float = 30.0  # a short one costs what it takes of half a minute
    stopped_over_seconds: float = 20.0
    stopped_near_seconds: float = 3.0  # samples of hosts are up to a second apart each

    # --- slow links ------------------------------------------------------------------
    link_min_operations: int = 20
    # Steps that are looked at: half of them must be slow for a median to be, also where a group
    # has one operation a step.
    link_steps: int = 32
    ln_link_floor: float = math.log(1.15)  # links of one kind differ by some percent
    link_sigmas: float = 6.0
    # With fewer groups across a component any of its members explains them as well.
    link_min_groups: int = 3
    link_min_f1: float = 0.8
    link_global_share: float = 0.5
    # Where there are too few groups: transfers that took so many times as long, far out of how they
    # scatter, in most steps: packets that are lost delay many, not each.
    slower_transfers_ratio: float = 2.0
    slower_transfers_sigmas: float = 4.0
    slower_transfers_share: float = 0.6
    # Connections between ranks only place what steps show. Two samples in different stretches of
    # four seconds, and one more for the time between: else a total says nothing of a rate.
    connection_seconds: float = 8.0
    # TCP sends 1.22 / sqrt(p) segments a round trip at a loss of p (Mathis et al. 1997): at 1 %
    # twelve, hardly more than the ten that a new connection may send at once (RFC 6928).
    connection_lost_share: float = 0.01
    connection_min_lost: int = 10  # so that half as many would be a rarer chance than 1 in 30
    connection_lost_multiple: float = 2.0  # of what it lost before
    connection_before_seconds: float = 32.0  # before the onset: eight stretches of four seconds
    connection_comparable_share: float = 0.1  # of a slow flow's bytes, to be compared with it
    # Which end of one pair it is: samples in which data waited, and the share of them, or of the
    # lost segments, of which the kernel of one end shows that it is there.
    connection_min_waits: int = 3
    connection_sure_share: float = 0.75
    # What takes a share of all steps is busy for that share; half of it for errors of both.
    connection_busy_share: float = 0.5
    # Healthy connections of four ranks on two cores, while busy: 44 to 94 MB/s, uneven by ticks.
    connection_slow_ratio: float = 3.0
    connection_min_compared: int = 2  # of a median of others
    # The third sending of the same data begins 1.4 s after the first (200 ms, doubled).
    connection_stuck_seconds: float = 4.0

    # --- verdict: which finding explains which, what is sure ------------------------------
    sure_confidence: float = 0.85  # high: a second signal agrees
    echo_confidence: float = 0.5  # a crash below it has seen echoes only
    # Of the newest steps a rank may lack so much and still be called healthy, with a word on it: a
    # fault that lasts shows in the others. Beyond, also its peers lose what they are compared with.
    healthy_missing_share: float = 0.10
    # Four samples of gradient norms: what an odd batch does shows within them.
    odd_batch_steps: int = 64
    order_slack_seconds: float = 1.0  # before its cause that an effect may be seen: states are late
    explained_cost_share: float = 0.5  # of what the run lost, that one cause takes to explain it

    @cached_property
    def hash(self) -> str:
        """Return 12 hexadecimal digits that name these values."""
        text = repr([(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


POLICY = Policy()
