"""The runs of certify.py: statements by name."""

from certify_flips import Flips
from certify_statements import Agreement, JointAgreement, Lemmas, Region, Reuse, Statement

STAGE_3 = ("layer3.*", "linear")
LAST_BLOCK = ("layer4.2.*", "fc")

RUNS: dict[str, Statement] = {
    **{f"digits_region_{k}": Region("digits", k / 255, 100, branches=1000) for k in (2, 4, 8)},
    "digits_intervals_0.25": Region("digits", 0.25 / 255, 100, method="intervals"),
    "digits_region_radius": Region("digits", None, 50),
    "digits_reuse_radius": Reuse("digits", None, 50),
    **{f"resnet20_stage3_{u}": Reuse("cifar_resnet20", u, 50, STAGE_3) for u in (1e-4, 1e-3, 3e-3)},
    **{f"resnet20_all_{u}": Reuse("cifar_resnet20", u, 10) for u in (1e-5, 1e-4)},
    **{f"resnet20_region_{k}": Region("cifar_resnet20", k / 255, 20, gap=0.25) for k in (0.0625, 0.125, 0.25)},
    **{f"resnet50_last_{u}": Reuse("resnet50_v1", u, 20, LAST_BLOCK) for u in (1e-4, 1e-3)},
    **{
        f"{name}_lemmas": Lemmas(name, 1e-4, 10, method="norms") for name in ("digits", "cifar_resnet20", "resnet50_v1")
    },
    "digits_agreement": Agreement("digits", None, 50, method="attack"),
    **{f"digits_agreement_{u}": JointAgreement("digits", u, 12) for u in (1e-3, 3e-3, 6e-3)},
    **{f"resnet20_agreement_{u}": JointAgreement("cifar_resnet20", u, 4, STAGE_3) for u in (3e-4, 1e-3)},
    "resnet20_flips": Flips("cifar_resnet20", None, 10_000),
    "resnet50_flips": Flips("resnet50_v1", None, 7_400, last_stage="magnitude"),
    "resnet50_flips_learned": Flips("resnet50_v1", None, 7_400, last_stage="learned"),
    "resnet50_flips_learned_norms": Flips("resnet50_v1", None, 7_400, last_stage="learned_norms"),
    "resnet50_flips_learned_fast": Flips("resnet50_v1", None, 7_400, last_stage="learned_fast"),
}
