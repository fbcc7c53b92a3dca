"""The default backend, which runs a small model in this process. It needs the extra `local`."""

try:
    from .backend import LocalBackend
except ModuleNotFoundError as missing:
    if (missing.name or "").startswith("responses_kit"):
        raise
    raise ImportError(
        f'The local backend needs {missing.name}, which is not installed: pip install "responses-kit[local]"',
        name=missing.name,
    ) from missing

__all__ = ["LocalBackend"]
