"""Sandboxes: rootless Podman containers with limits that are enforced, no network, and evidence read from outside."""

from legorl.sandbox.container import RunResult, Sandbox, open_sandbox
from legorl.sandbox.errors import (
    ImageBroken,
    ImageMissing,
    LimitsError,
    PatchUnusable,
    PodmanMissing,
    SandboxError,
    SandboxLost,
)
from legorl.sandbox.image import BASE_IMAGE
from legorl.sandbox.leftovers import reap
from legorl.sandbox.limits import Evidence
from legorl.sandbox.making import prepare, ready_image
from legorl.sandbox.probe import ensure_ready
from legorl.sandbox.seat import Spec
from legorl.sandbox.supplies import mountable

__all__ = [
    "BASE_IMAGE",
    "Evidence",
    "ImageBroken",
    "ImageMissing",
    "LimitsError",
    "PatchUnusable",
    "PodmanMissing",
    "RunResult",
    "Sandbox",
    "SandboxError",
    "SandboxLost",
    "Spec",
    "ensure_ready",
    "mountable",
    "open_sandbox",
    "prepare",
    "ready_image",
    "reap",
]
