"""What can go wrong with a sandbox, and whose fault it is.

SandboxError and its kinds blame the infrastructure; PatchUnusable is about what the agent left or sent (blame model),
ImageBroken about the task.
"""


class SandboxError(Exception):
    """The sandbox could not be had or was lost; nothing is said about the agent's work."""


class PodmanMissing(SandboxError):
    """Podman is not installed or not set up on this machine."""


class ImageMissing(SandboxError):
    """The image is not in the local store and cannot be had; images are never pulled behind the user's back."""


class LimitsError(SandboxError):
    """A limit cannot be set, or the probe found that it is not enforced."""


class HostsGone(SandboxError):
    """No Podman host is left that answers. `code`: a command ends with the exit code for lost infrastructure."""

    code = 3


class SandboxLost(SandboxError):
    """The container ended under us: lifetime over, supervisor killed, Podman killed.

    The content of a container can bring this about too (memory full): read `Sandbox.evidence()` before blaming infra.
    """


class ImageBroken(Exception):
    """The task's Dockerfile cannot be built (the message has the end of the log), or its image can run no sandbox."""


class PatchUnusable(Exception):
    """The tree cannot be collected as a patch, or a patch does not apply; the message is git's, or names the limit."""
