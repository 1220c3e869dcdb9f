import pathlib
import re

import jax
import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
@jax.numpy_dtype_promotion("standard")  # As a reader has it.
def test_the_code_of_the_readme_runs(block):
    exec(block, {})


def test_there_is_code_in_the_readme():
    assert BLOCKS
