"""Learn masks by gradient descent on logits over the codes of every block; the weights are frozen."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, get_args

import torch
from torch import nn

from halve.batches import Forward, Progress, iterate
from halve.errors import LearningError, LearningWarning, OptionError, first_line, listed, warn
from halve.learn.accuracy_budget import Metric, Trade, warn_if_coarse
from halve.learn.baseline import Baseline
from halve.learn.comparison import Comparison, Verdict
from halve.learn.distributed import Processes
from halve.learn.form import Precision, form_of
from halve.learn.frozen import frozen as frozen_copy
from halve.learn.held_back import Split, chosen_from, hold_back, hold_back_none
from halve.learn.initialization import (
    Inputs,
    Layers,
    Search,
    check_start,
    initial_sampler,
    initial_scores,
    layers_of,
    order_channels,
    reads_data,
    select_layers,
)
from halve.learn.interrupt import deferred_interrupt
from halve.learn.learner import Learner
from halve.learn.loop import Loop
from halve.learn.objective import find_blocks, named_blocks, resolve_objective
from halve.learn.probe import Estimate
from halve.learn.reporting import Report, Reporter, check_log
from halve.learn.run import Run
from halve.learn.run_state import RunFile, check_new, saved_permutation, saved_precision
from halve.learn.settings import LearnOptions, Settings, preset_options, split_options
from halve.learn.stream import BatchStream
from halve.learn.time_budget import TimeBudget
from halve.learn.validation import Validation
from halve.masks.mask import MaskSet
from halve.modules import device_of, unwrapped
from halve.permute.policy import search_by_default, search_seconds
from halve.process_state import preserved_process_state
from halve.select.speed_plan import SpeedPlan, plan_of

_SHARE = 4  # masks are learned again for a quarter of the steps
_NOT_AGAIN = (  # options of `learn` that hold for the first run only
    *("minutes", "epochs", "permute", "permute_seconds", "run_state", "resume", "log"),
    *("exclude", "plan", "target", "max_drop", "min_speedup", "drop_data", "drop_metric"),
)


@preserved_process_state()
@torch.inference_mode(False)
@torch.enable_grad()
def learn(
    model: nn.Module,
    data: Any,
    *,
    preset: str | None = None,
    permute: bool | None = None,
    permute_seconds: float | None = None,
    example: Any = None,
    validation: Any = None,
    fallback: bool = True,
    max_drop: float | None = None,
    min_speedup: float | None = None,
    drop_data: Any = None,
    drop_metric: Metric = "agreement",
    run_state: str | Path | None = None,
    save_every: float = 60.0,
    resume: bool = False,
    log: str | Path | None = None,
    trackers: Sequence[Any] = (),
    report: Callable[[Estimate | Report], None] | None = None,
    progress: Progress = True,
    forward: Forward | None = None,
    precision: Precision = "auto",
    **options: Unpack[LearnOptions],
) -> MaskSet:
    """Learn which N of every M weights to keep, so that the masked network matches the dense one.

    The model and its weights are not changed. Ctrl-C ends the run and returns the masks learned so far. Under torchrun
    all processes learn together and return the same masks.

    Some images are held back: at the end the learned masks are compared with one-shot masks on them, by their KL
    divergence from the dense network, and the better ones are returned. `masks.recipe["quality"]` holds the numbers.

    Args:
        model: The trained network.
        data: Batches of images, such as a DataLoader; labels are not needed. One tensor is split into batches of 64.
            Layers that do not run on the first batch are not masked.
        minutes: Budget in minutes, for all that this call does except `max_drop` and `min_speedup`. Default: 2.0,
            unless `steps` or `epochs` is given.
        steps: Budget in optimizer steps.
        epochs: Budget in passes over the data.
        accumulate: Batches per step. Default: 1.
        objective: "distill" (no labels needed) or "task" (cross-entropy with the labels); in Python also a function of
            `halve.Views` that returns the loss. Default: "distill".
        match: What "distill" matches: "auto" (outputs and features, later class probabilities as far as the batches
            show all classes), "outputs+features" (for outputs that are not class scores), "outputs", "features" or
            "probabilities". Default: "auto".
        features: Modules whose outputs are matched, as glob patterns; by default the repeated blocks of the network.
        augment: Flip, crop and mix the images for "distill". Default: True.
        start: Initial masks: "magnitude", "wanda", "reconstruct" or "random" (see `halve.prune`), "glorot" for random
            logits, or existing masks to continue from: unless `include`, `exclude` or `also` names others, their
            layers are masked again, with `plan` those of them where a mask pays. Default: "magnitude".
        alpha: Sharpness of the initial logits. Default: 8.0.
        noise: Scale of the Gumbel noise, one number or start and end; the end is reached at 80 % of the run.
            Default: (1.0, 0.0), or (0.3, 0.0) in runs that are expected to take fewer than 2,000 steps.
        temperature: Temperature of the Gumbel-Softmax, one number or start and end. Default: 1.0.
        hard: Sample hard masks with straight-through gradients instead of soft ones. Default: True.
        final: Final masks: "argmax" (most likely codes) or "sample" (one last sample). Default: "argmax".
        norms: "frozen", "learn" scale and shift of BatchNorm, LayerNorm and GroupNorm with the masks, or "track" the
            statistics of BatchNorm as training does. The checkpoint does not change: the mask file holds what was
            learned, and `apply` puts it on. Default: "frozen".
        lr: Learning rate of AdamW. Default: 0.07.
        betas: Averaging coefficients of AdamW. Default: (0.9, 0.99).
        weight_decay: Weight decay of AdamW. Default: 0.0.
        schedule: Learning rate schedule: "cosine", "constant" or "paper" (divided by 10 every third epoch).
            Default: "cosine".
        seed: Seed of all random numbers. Default: 0.
        preset: "paper" for the paper's recipe, or "paper-tuned" for the same at its best; they need labels, and other
            options override them.
        permute: Search for channel orders in which blocks keep more before learning; see `halve.prune`. By default
            wherever the model can be captured, except with a preset, flat blocks or random logits; the recipe says why
            not. Existing masks bring their own orders.
        permute_seconds: Time limit of that search. Default: a quarter of `minutes`. If steps or epochs are counted, 120
            seconds with `permute`; otherwise a quarter of a second for each of the `steps`, at most 30 seconds.
        example: A batch to capture the model on; by default the first batch of the data.
        validation: Images to compare the masks on, at most 512 of them, instead of those that are held back: by default
            the last 5 % of a tensor or a list (8 to 512), as many random images of a map-style DataLoader, the first
            256 of a stream, none if there are fewer than 64. False holds none back.
        fallback: Whether to return one-shot masks if the learned ones are worse. Presets always return what was
            learned. Default: True.
        max_drop: Accuracy budget: leave the costliest layers dense until `drop_metric` drops by at most this share, and
            learn the others again. With `plan`, those that save the fewest milliseconds for their cost.
        min_speedup: Speed target, such as 1.5: leave as many layers dense, by the same order, as the speed-up that
            `plan` estimates allows.
        drop_data: Images on which the drop is measured. Default: those that are held back, which then give no
            confidence interval for the masks, as they chose the layers.
        drop_metric: "agreement" with the dense network, or "top1" accuracy (needs labels). Default: "agreement".
        run_state: File that the state of the run is saved to, for `resume`.
        save_every: Seconds between saves. Default: 60.0.
        resume: Continue the run in `run_state`; on a CPU bit-identical to an uninterrupted run if the data comes in the
            same order. Default: False.
        log: JSONL file for loss, entropy, changed blocks and images per second.
        trackers: Trackers of Accelerate, such as "tensorboard" or "wandb".
        report: Function that receives an `Estimate` first and a `Report` after each step.
        progress: Show progress in terminals and notebooks, or a function such as `tqdm.tqdm` that wraps loops.
            Default: True.
        forward: Function of (model, batch) that runs the model on an unusual batch.
        precision: "auto" (bfloat16 on a GPU, and on a CPU that has instructions for it unless the network has
            depthwise convolutions, which are slower in it), "float32" or "bfloat16". Default: "auto".
        pattern, include, exclude, also, order, remainder, kinds, plan, target: Options of `halve.select`.

    Returns:
        The masks, with a recipe that says how they were made.

    Raises:
        LearningError: The loss became NaN or infinite, `max_drop` could not be met, or something failed after the first
            step, such as the data, `report` or the validation; its `masks` are those learned so far.

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    >>> masks = halve.learn(model, torch.randn(128, 8), steps=20, fallback=False)
    >>> masks
    MaskSet(1 layer, 128 weights, 50.0 % kept)
    >>> masks.recipe["quality"]["images"]
    8
    """
    model = unwrapped(model)
    selection, given = split_options({**preset_options(preset), **options})
    settings = Settings.of(given)
    budget = TimeBudget(settings.budget_minutes)
    trade = Trade.of(max_drop, min_speedup, drop_data, drop_metric, selection)
    _check_types(log=log, run_state=run_state, report=report, progress=progress, permute=permute, fallback=fallback)
    _check_options(settings, permute, precision, run_state, resume)
    if log is not None:
        check_log(log)
    seconds = search_seconds(permute_seconds, bool(permute), settings.budget_minutes, settings.steps)
    if budget.seconds is not None and seconds >= budget.seconds:
        raise OptionError(
            f"permute_seconds={seconds:g} leaves no time to learn: the call takes {budget.seconds:g} seconds"
        )

    # select
    split = _split(data, validation, settings.seed)
    processes = Processes(device_of(model), trackers, None if log is None else Path(log).parent)
    if trade is not None:
        trade = trade.on(split)
        if trade.max_drop is not None and trade.images is not None and processes.is_main:
            warn_if_coarse(trade.max_drop, trade.images)
    inputs = Inputs(model, split.data, forward, progress if processes.is_main else False)
    stream = BatchStream(split.data, processes.rank, processes.count)
    first = _first_batch(inputs, settings, stream)
    layers = select_layers(model, selection, first, forward, settings.start)
    selection = layers.selection
    if trade is not None:
        trade.check_reachable(list(layers.weights))
    if resume and run_state is not None and precision == "auto":
        precision = saved_precision(run_state)
    frozen = frozen_copy(model, layers.choices).to(processes.device)
    form = processes.broadcast(form_of(frozen, first, forward, precision))  # batches of processes differ
    form.convert_(frozen)
    blocks = _blocks(frozen, layers, settings)
    _warn_if_unknown(split, validation, processes)

    # initialize and permute
    known = saved_permutation(run_state, model, layers.choices) if resume and run_state is not None else None
    search = None
    if _wants_search(permute, known, resume, settings, preset, layers):
        search = Search(first if example is None else example, seconds, bool(permute), known)
    scores = initial_scores(inputs, layers, settings, search)
    orders = processes.broadcast(order_channels(inputs, layers, settings, search, scores))
    sampler = initial_sampler(inputs, layers, settings, orders, search, scores).to(processes.device)
    sampler.contiguous = not form.channels_last
    del scores  # as large as the weights

    # learn
    run = Run(inputs, layers, orders, settings, split, stream, processes, form)
    learner, recipe = run.learner(frozen, sampler, blocks), run.recipe(preset, blocks, selection)

    def complete(found: MaskSet, quality: Mapping[str, Any] | None = None) -> MaskSet:
        facts = {"quality": quality or {"unknown": "not measured"}, "seconds": round(budget.spent, 1)}
        return run.complete(found, recipe | facts)

    comparison = Comparison(
        Validation(learner, split, settings) if split.source else None,
        Baseline(inputs, layers, orders.choices(layers), settings, MaskSet(sampler.masks())),
        stream,
        why_none=split.reason,
        complete=complete,
        fallback=fallback and preset is None,
    )
    file = None
    if run_state is not None:
        file = RunFile(Path(run_state), save_every, *run.identity(), orders.state(), learner.statistics)
    reporter = Reporter(processes, report, log, progress is True)
    outcome = Loop(learner, stream, settings, processes, reporter, budget, comparison, file).run(resume)

    # finish
    recipe |= outcome.recipe()
    if outcome.error is not None:
        raise LearningError(outcome.error, _kept(learner, settings, complete)) from outcome.cause
    learned = learner.masks(settings.final, settings.seed)
    verdict = _verdict(comparison, learned, processes, complete)
    masks = complete(verdict.masks, verdict.quality())
    if processes.is_main:
        verdict.warn()
    if trade is not None:
        trade, masks = _traded(trade, inputs, masks, processes.is_main)
        masks = processes.broadcast(masks)  # processes may measure different drops, and must go on alike
        if masks.recipe["left_dense"]:
            masks = processes.broadcast(comparison.judged(masks, trade.held_back) if processes.is_main else masks)
            others = {"forward": forward, "precision": precision, "report": report, "progress": progress}
            masks = _relearned(trade, run, comparison, masks, {**given, **selection, **others})
    plan = selection.get("plan")
    return masks if plan is None else with_estimate(masks, plan_of(plan))


def _check_options(
    settings: Settings,
    permute: bool | None,
    precision: Precision,
    run_state: str | Path | None,
    resume: bool,
) -> None:
    """Raise for values and combinations that are not allowed, before any work is done."""
    resolve_objective(settings.objective, settings.match)
    check_start(settings.start)
    if permute and isinstance(settings.start, MaskSet):
        raise OptionError("permute=True cannot be combined with start=masks: masks bring their own channel orders")
    if precision not in get_args(Precision):
        raise OptionError(f"precision must be one of {listed(get_args(Precision))}, got {precision!r}")
    if resume and run_state is None:
        raise OptionError("resume=True needs run_state=, the file to resume from")
    if run_state is not None and not resume:
        check_new(run_state)


def _check_types(**given: Any) -> None:
    """Raise for options that are of no use as what they are."""
    for name in ("log", "run_state"):
        if not isinstance(given[name], str | Path | None):
            raise OptionError(f"{name} must be the name of a file, got {given[name]!r}")
    for name in ("permute", "fallback"):
        if not isinstance(given[name], bool | None):
            raise OptionError(f"{name} must be True or False, got {given[name]!r}")
    if given["report"] is not None and not callable(given["report"]):
        raise OptionError(f"report must be a function of an Estimate or a Report, got {given['report']!r}")
    if not isinstance(given["progress"], bool | None) and not callable(given["progress"]):
        raise OptionError(f"progress must be True, False or a function such as tqdm.tqdm, got {given['progress']!r}")


def _split(data: Any, validation: Any, seed: int) -> Split:
    """What to learn from, and images to judge the masks by."""
    if validation is None or validation is True:
        return hold_back(data, seed)
    everything = hold_back_none(data, seed)
    if validation is False:
        return everything
    return replace(everything, held_back=chosen_from(validation, seed), source="validation=")


def _warn_if_unknown(split: Split, validation: Any, processes: Processes) -> None:
    if not split.source and validation is not False and processes.is_main:
        warn(
            f"the quality of the masks will be unknown: {split.reason}; pass more images, or others with validation=",
            LearningWarning,
        )


def _blocks(frozen: nn.Module, layers: Layers, settings: Settings) -> list[str]:
    """Modules whose features are compared."""
    if settings.features is not None:
        return named_blocks(frozen, settings.features)
    return find_blocks(frozen, list(layers.weights)) if settings.compares_features else []


def _wants_search(
    permute: bool | None,
    known: dict[str, Any] | None,
    resume: bool,
    settings: Settings,
    preset: str | None,
    layers: Layers,
) -> bool:
    """Whether to search for channel orders. A resumed run does what it did when it was started."""
    if isinstance(settings.start, MaskSet):
        return False
    if permute is not None:
        return permute
    return known is not None if resume else search_by_default(settings.start, preset, layers.choices)


def _first_batch(inputs: Inputs, settings: Settings, stream: BatchStream) -> Any:
    """The first batch, to look at which layers run and to capture the model on; the run still gets to see it."""
    # Scores that read the data would invalidate a stream that is open already.
    return next(iterate(inputs.data)) if reads_data(settings.start) else stream.peek()


def _kept(learner: Learner, settings: Settings, complete: Callable[[MaskSet], MaskSet]) -> MaskSet | None:
    """What a run that failed has learned so far."""
    try:
        return complete(learner.masks(settings.final, settings.seed))
    except Exception:  # a device that failed gives no masks, and the error that is raised says what happened to it
        return None


def _verdict(
    comparison: Comparison,
    learned: MaskSet,
    processes: Processes,
    complete: Callable[[MaskSet], MaskSet],
) -> Verdict:
    """The better of learned and one-shot masks; an error keeps those that were learned."""
    try:
        with deferred_interrupt():  # it takes seconds
            verdict = processes.broadcast(comparison.choose(learned) if processes.is_main else None)
    except Exception as error:  # validation and forward are the user's
        what = f"{first_line(error)}; the masks as learned are in the error's .masks"
        raise LearningError(what, complete(learned)) from error
    assert verdict is not None
    return verdict


def _traded(trade: Trade, inputs: Inputs, masks: MaskSet, warns: bool) -> tuple[Trade, MaskSet]:
    """The masks within the accuracy budget or the speed target; an error keeps those that were learned."""
    try:
        trade = trade.reread()
        return trade, trade.enforced(inputs.model, masks, inputs.forward, inputs.progress, warns)
    except Exception as error:  # drop_data and forward are the user's
        raise LearningError(f"{first_line(error)}; the masks as learned are in the error's .masks", masks) from error


def with_estimate(masks: MaskSet, plan: SpeedPlan) -> MaskSet:
    """The masks, with the estimated time of the network, and what masks in the layers left dense would have saved."""
    left = masks.recipe.get("left_dense")
    if not left:
        return masks.with_recipe(estimated=plan.estimate(masks))
    now = plan.ms(masks)
    saved = {name: round(now - plan.ms([*masks, name]), 6) for name in left}
    return masks.with_recipe(estimated=plan.estimate(masks), left_dense_ms=saved)


def options_to_relearn(options: Mapping[str, Any], masks: MaskSet, steps: int) -> dict[str, Any]:
    """The options of `learn` to learn these masks again, and no others, given those of the run that they are from.

    Args:
        options: Options of that run.
        masks: Where to start, with the remaining layers.
        steps: Steps of that run.
    """
    again = {key: value for key, value in options.items() if key not in _NOT_AGAIN}
    return again | {"start": masks, "steps": max(1, steps // _SHARE), **layers_of(masks), "fallback": False}


def _relearned(trade: Trade, run: Run, comparison: Comparison, masks: MaskSet, options: Mapping[str, Any]) -> MaskSet:
    """The masks of the layers that are not left dense, learned again for a quarter of the steps, if that is better."""
    recipe, split, inputs, processes = masks.recipe, run.split, run.inputs, run.processes

    def as_they_are(reason: str, *, tell: bool = True) -> MaskSet:
        if tell and processes.is_main:
            warn(f"the remaining layers were not learned again: {reason}", LearningWarning)
        return masks.with_recipe(not_relearned=reason)

    if recipe["ended"] == "interrupted":
        return as_they_are("interrupted", tell=False)
    if split.kind == "iterator":
        return as_they_are("the data is an iterator, which gives its images once; pass a DataLoader or a list")
    again = options_to_relearn(options, masks, recipe["steps_done"])
    validation = split.held_back if split.source else False
    try:
        found = learn(inputs.model, split.data, **again, validation=validation)
        if found.recipe["ended"] == "interrupted":
            return as_they_are("interrupted", tell=False)
        drop = processes.broadcast(trade.drop(inputs.model, found, inputs.forward))
    except Exception as error:  # data, report and forward are the user's
        return as_they_are(first_line(error))
    if drop > recipe["drop"]:
        worse = f"the drop was {100 * drop:.2f} % afterwards, and {100 * recipe['drop']:.2f} % before"
        return as_they_are(worse, tell=False)
    found = found.with_recipe(**{**recipe, "drop": drop, "relearned": again["steps"]})
    judged = comparison.judged(found, trade.held_back, returned="learned") if processes.is_main else found
    return processes.broadcast(judged)
