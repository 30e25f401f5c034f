"""Learn masks by gradient descent on logits over the codes of every block; the weights are frozen."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import nn

from halve.batches import Forward, Progress, iterate
from halve.errors import DataError, HalveError, LearningError, ModelError
from halve.learn.accuracy_budget import Metric, check_budget, keep_dense
from halve.learn.distributed import Ranks
from halve.learn.frozen import channels_last_, device_of
from halve.learn.frozen import frozen as frozen_copy
from halve.learn.initialization import Start
from halve.learn.learner import Learner
from halve.learn.loop import Loop
from halve.learn.objective import find_blocks, named_blocks, objective_named
from halve.learn.probe import Estimate
from halve.learn.reporting import Report, Reporter
from halve.learn.run_state import Checkpoint
from halve.learn.settings import LearnOptions, Settings, preset_options, split_options
from halve.learn.stream import Feed
from halve.masks.fingerprint import digest
from halve.masks.mask import MaskSet
from halve.masks.recipe import origin_of, with_fingerprint
from halve.permute.policy import search_by_default, search_seconds
from halve.select.select import Choice, masked_weights, plain_options, select

Precision = Literal["auto", "float32", "bfloat16"]


@torch.inference_mode(False)
@torch.enable_grad()
def learn(
    model: nn.Module,
    data: Any,
    *,
    preset: str | None = None,
    forward: Forward | None = None,
    precision: Precision = "auto",
    checkpoint: str | Path | None = None,
    checkpoint_every: float = 60.0,
    resume: bool = False,
    log: str | Path | None = None,
    trackers: Sequence[Any] = (),
    report: Callable[[Estimate | Report], None] | None = None,
    progress: Progress | None = None,
    permute: bool | None = None,
    permute_seconds: float | None = None,
    example: Any = None,
    max_drop: float | None = None,
    drop_data: Any = None,
    drop_metric: Metric = "agreement",
    **options: Unpack[LearnOptions],
) -> MaskSet:
    """Learn which N of every M weights to keep, so that the masked network does what the dense one does.

    `data` gives batches of images, labels are not needed. The model stays as it is. Options, all with defaults:

    - budget: `minutes` (2), `steps`, or `epochs`; `accumulate` batches per step.
    - `objective`: "distill" matches the dense network's outputs and the features of its blocks, and more and more its
      class probabilities, as far as batches show all classes (`match`: "all"; "both" for outputs and features, as
      networks want that give no class scores; "outputs", "features" or "probabilities" alone; `features` names blocks
      by glob); "task" is cross-entropy; or a function of `Views`. `augment` (True) varies the images that are distilled
      on: flips, crops, mixtures.
    - `start`: "magnitude" or another score, with sharpness `alpha` (8); a MaskSet to go on from; "glorot" for random.
    - `noise`: scale of the Gumbel noise, from 1 at the start to 0 at four fifths of the run, where sampling has become
      the final choice; `temperature` (1.0, or a pair), `hard` samples, `final` "argmax" or "sample", `seed`.
    - `lr` (0.07), `betas`, `weight_decay`, `schedule` ("cosine", "constant"), for AdamW.
    - `permute`: first look for channel orders in which blocks keep more; see `prune`. By default wherever the model's
      structure can be captured (the recipe says why not), except with a preset, `order="flat"` or "glorot". Masks to
      start from bring their own. The search comes on top of the budget and takes at most `permute_seconds`: 120 if
      asked for; by default a quarter of `minutes` up to that, or 30 where steps or epochs are counted.
    - `preset="paper"`: the paper's recipe.
    - the options of `select`: pattern, include, exclude, also, order, remainder, kinds.
    - `max_drop` with `drop_data`: leave the costliest layers dense until agreement (`drop_metric`, or "top1") falls by
      no more than that.

    `checkpoint` names a file that is written every `checkpoint_every` seconds; `resume=True` goes on from it, to the
    same bits on a CPU when the data comes in the same order. `log` is a JSONL file, `trackers` are Accelerate's;
    `report` gets an `Estimate` first, a `Report` after each step; `progress` shows what else takes long. Under torchrun
    all ranks learn alike.

    >>> import halve
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    >>> masks = halve.learn(model, torch.randn(128, 8), steps=20)
    >>> masks
    MaskSet(1 layer, 128 weights, 50.0 % kept)
    """
    where, how = split_options({**preset_options(preset), **options})
    settings = Settings.of(how)
    if (max_drop is None) != (drop_data is None):
        raise DataError("max_drop= and drop_data= go together: the drop is measured on data of its own")
    if max_drop is not None:
        check_budget(max_drop, drop_metric)
    if permute and isinstance(settings.start, MaskSet):
        raise ModelError("permute=True and start=masks: masks to start from bring their own channel orders")
    seconds = search_seconds(permute_seconds, bool(permute), settings.budget_minutes)
    if checkpoint is not None and not resume:
        Checkpoint.refuse_to_overwrite(checkpoint)
    chosen = select(model, **where)
    weights = masked_weights(model, chosen)
    start = Start(model, chosen.masked, weights, settings, data, forward, progress)
    ranks = Ranks(device_of(model), trackers, None if log is None else Path(log).parent)
    frozen = frozen_copy(model, chosen.masked).to(ranks.device)
    if ranks.device.type == "cuda":
        channels_last_(frozen)
    autocast, objective = _autocast(precision, ranks.device), objective_named(settings.objective, settings.match)
    if settings.features is not None:
        blocks = named_blocks(frozen, settings.features)
    else:
        blocks = find_blocks(frozen, list(weights)) if _sees_features(settings) else []
    # A loader with persistent workers has one iterator for all: where scores read the data too, the feed comes last.
    feed = None if start.reads_data else Feed(data, ranks.rank, ranks.count)
    known = Checkpoint.permutation_in(checkpoint) if resume and checkpoint is not None else None
    wanted = permute
    if wanted is None:  # a run that is resumed goes on as it was begun
        wanted = known is not None if resume else search_by_default(settings.start, preset, chosen.masked)
    permutation, left = start.own_orders(), ""
    if wanted and not isinstance(settings.start, MaskSet):
        if example is None:
            example = next(iterate(data)) if feed is None else feed.peek()
        permutation, left = start.orders(example, seconds, known, asked=bool(permute))
    permutation, left = ranks.agree((permutation, left))
    choices, moves = (permutation.choices, permutation.moves) if permutation else (chosen.masked, {})
    sampler = start.sampler(choices).to(ranks.device)
    learner = Learner(
        frozen,
        sampler,
        objective,
        blocks,
        forward=forward,
        dense=settings.objective != "task",
        hard=settings.hard,
        seed=settings.seed,
        rank=ranks.rank,
        autocast=autocast,
        augment=settings.augment and settings.objective == "distill" and forward is None,
    )
    identity = {
        "settings": settings.described(),
        "layers": {c.name: [str(c.pattern), *_layout_of(c)] for c in choices},
        "weights": {name: digest(weight) for name, weight in weights.items()},
        "ranks": ranks.count,
    }

    def masks_now(recipe: dict[str, Any]) -> MaskSet:
        shared = {choice.name: choice.shared_with for choice in chosen.masked}
        found = sampler.masks(settings.final, settings.seed)
        masks = {name: with_fingerprint(mask, weights[name], shared[name]) for name, mask in found.items()}
        made = {"method": "learn", **settings.described(), "preset": preset, "blocks": blocks}
        made |= {"selection": plain_options(where), "permute": permutation.summary if permutation else None}
        if left:
            made["not_permuted"] = left
        told = made | recipe | origin_of(model)
        return MaskSet({choice.name: masks[choice.name] for choice in choices}, recipe=told, moves=moves)

    feed = Feed(data, ranks.rank, ranks.count) if feed is None else feed
    reporter = Reporter(ranks, report, log)
    orders = permutation.plain() if permutation else {"left": left} if left else None
    loop = Loop(learner, feed, settings, ranks, identity, masks_now, reporter, checkpoint, checkpoint_every, orders)
    masks = loop.run(resume)
    if max_drop is None:
        return masks
    try:
        return keep_dense(model, masks, drop_data, max_drop, drop_metric, forward=forward, progress=progress)
    except HalveError as error:
        raise LearningError(f"{error}; the masks as they were learned are in the error's .masks", masks) from error


def _sees_features(settings: Settings) -> bool:
    distilled = settings.objective == "distill" and settings.match in ("all", "both", "features")
    return callable(settings.objective) or distilled


def _layout_of(choice: Choice) -> tuple[Any, ...]:
    assert choice.layout is not None
    order = choice.layout.channel_order
    return choice.layout.order, choice.layout.pad, list(choice.layout.shape), order and hash(order)


def _autocast(precision: Precision, device: torch.device) -> torch.dtype | None:
    if precision not in ("auto", "float32", "bfloat16"):
        raise ModelError(f"precision={precision!r}: there are 'auto' (bfloat16 on a GPU), 'float32' and 'bfloat16'")
    wanted = precision == "bfloat16" or (precision == "auto" and device.type == "cuda")
    return torch.bfloat16 if wanted else None
