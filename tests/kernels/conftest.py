"""Without a GPU kernels run in Triton's interpreter, each case in a process of its own: an access out of bounds ends that one."""

import os
import traceback
import warnings
from collections.abc import Callable

import pytest
import torch


def _apart(check: Callable[[], None]) -> None:
    """Run a check in a forked process, whose exit status counts; on a GPU, here."""
    if torch.cuda.is_available():
        check()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forking beside threads: none is in a lock here
        child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException:  # whatever it is ends this process, whose exit status fails the test
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture(name="apart")
def fixture_apart() -> Callable[[Callable[[], None]], None]:
    """A function that runs a check in a process of its own."""
    return _apart
