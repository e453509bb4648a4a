"""Sandboxes: rootless Podman containers with limits that are enforced, no network, and evidence read from outside."""

from legorl.sandbox.container import RunResult, Sandbox, Spec, open_sandbox
from legorl.sandbox.errors import ImageMissing, LimitsError, PatchUnusable, PodmanMissing, SandboxError, SandboxLost
from legorl.sandbox.image import BASE_IMAGE
from legorl.sandbox.leftovers import reap
from legorl.sandbox.limits import Evidence
from legorl.sandbox.probe import ensure_ready
from legorl.sandbox.supplies import mountable

__all__ = [
    "BASE_IMAGE",
    "Evidence",
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
    "reap",
]
