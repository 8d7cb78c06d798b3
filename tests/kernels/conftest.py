"""The native library, built if it is not there; tests of it are skipped only where no compiler is found."""

from collections.abc import Iterator

import pytest

from mference_kernels import compile as build
from mference_kernels import native


@pytest.fixture(scope="session")
def native_library() -> None:
    try:
        native.library()
    except native.Unavailable:
        if not build.compiler():
            pytest.skip("no C compiler to build the native library with")
        assert build.build() is None
        native.library.cache_clear()
        native.library()


@pytest.fixture
def restored(native_library: None) -> Iterator[None]:
    """Leave the best variant and all cores behind, whatever the test chose."""
    del native_library
    yield
    native.choose(native.variants()[0])
    native.set_threads(native.available_cores())
