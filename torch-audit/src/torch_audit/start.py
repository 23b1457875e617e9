"""The recorder's settings, carried from the launcher to all ranks in environment variables."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_HOOK = Path(__file__).resolve().parent / "hook"


@dataclass(frozen=True)
class Settings:
    """The quantities to record, and the folder for them."""

    out: Path
    steps: int = 3
    perturbed: int = 0  # the seed of a perturbation; 0: none
    float64: bool = (
        False  # new tensors are float64 unless the program says otherwise
    )
    contents: bool = False  # also hashes of the weights: see `contents`
    find_in: Path | None = None  # the run whose contents place the parameters

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment in which an audited program is started."""
        # Python runs `sitecustomize` from the first folder of PYTHONPATH that
        # has one.
        paths = [str(_HOOK), inherited.get("PYTHONPATH", "")]
        return {
            **inherited,
            "PYTHONPATH": ":".join(path for path in paths if path),
            "TORCH_AUDIT_OUT": str(self.out),
            "TORCH_AUDIT_STEPS": str(self.steps),
            "TORCH_AUDIT_PERTURBED": str(self.perturbed),
            "TORCH_AUDIT_FLOAT64": str(int(self.float64)),
            "TORCH_AUDIT_CONTENTS": str(int(self.contents)),
            "TORCH_AUDIT_FIND_IN": str(self.find_in or ""),
        }


def settings_of(environment: Mapping[str, str]) -> Settings:
    return Settings(
        Path(environment["TORCH_AUDIT_OUT"]),
        int(environment["TORCH_AUDIT_STEPS"]),
        int(environment["TORCH_AUDIT_PERTURBED"]),
        environment["TORCH_AUDIT_FLOAT64"] == "1",
        environment["TORCH_AUDIT_CONTENTS"] == "1",
        Path(found) if (found := environment["TORCH_AUDIT_FIND_IN"]) else None,
    )


def start_recorder(environment: Mapping[str, str]) -> None:
    """Starts recording in this process, which has just imported torch."""
    import torch

    from .recorder import Recorder

    settings = settings_of(environment)
    if settings.float64:
        torch.set_default_dtype(torch.float64)
    recorder = Recorder(
        settings.out,
        settings.steps,
        settings.perturbed,
        contents=settings.contents,
        find_in=settings.find_in,
    )
    recorder.install()
