"""Runs commands of dpmp in this process."""

import pytest

from dpmp.__main__ import main


@pytest.fixture
def refusal(capsys):
    """`refusal(*args)` is the message of a command that is refused."""

    def refusal_of(*args):
        with pytest.raises(SystemExit) as error:
            main([str(x) for x in args])
        assert error.value.code == 2
        return capsys.readouterr().err

    return refusal_of
