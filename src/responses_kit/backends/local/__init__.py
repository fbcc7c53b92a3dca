"""The default backend: a small model that runs in this process. Needs `pip install "responses-kit[local]"`."""

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
