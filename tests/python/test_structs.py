"""What python/bindings.py makes of the C headers is what the compiler has of them."""

import ctypes
import enum
import pathlib
import re
import subprocess
import sys

import pytest

from rebatch import _library, _c_struct

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))
import bindings  # noqa: E402

EXPORTED = '__attribute__((visibility("default"))) '
INCLUDE = '#include <stdio.h>\n#include <stddef.h>\n#include "rebatch/rebatch.h"\n'


def c_prints(tmp_path, expressions):
    """What a C program prints of these expressions: a list of numbers."""
    program = tmp_path / "print"
    lines = [f'printf("%lld\\n", (long long)({expression}));' for expression in expressions]
    source = INCLUDE + "int main(void)\n{\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    command = ["cc", "-std=c11", f"-I{ROOT}/include", "-o", program, "-x", "c", "-"]
    subprocess.run(command, input=source, text=True, check=True)
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return [int(number) for number in output.split()]


def made(kind):
    """The classes of this kind that were made."""
    classes = [each for each in vars(_library).values() if isinstance(each, type)]
    return [
        each for each in classes if issubclass(each, kind) and each.__doc__ and each is not kind
    ]


def test_structs_have_the_layout_of_the_headers(tmp_path):
    expected = {}
    for cls in made(_c_struct.Struct):
        name = cls.__doc__
        expected[f"sizeof({name})"] = ctypes.sizeof(cls)
        for field, _ in cls._fields_:
            expected[f"offsetof({name}, {field})"] = getattr(cls, field).offset
            expected[f"sizeof((({name} *)0)->{field})"] = getattr(cls, field).size
    assert "sizeof(rebatch_options)" in expected
    assert dict(zip(expected, c_prints(tmp_path, expected))) == expected


def test_enums_have_the_values_of_the_headers(tmp_path):
    expected = {}
    for cls in made(enum.IntEnum):
        prefix = cls.__doc__.split()[1].removesuffix("...")
        expected.update({prefix + name: int(value) for name, value in cls.__members__.items()})
    assert "REBATCH_E_USER" in expected
    assert dict(zip(expected, c_prints(tmp_path, expected))) == expected


def test_all_functions_of_the_headers_are_there():
    text = "".join(path.read_text() for path in (ROOT / "include/rebatch").glob("*.h"))
    declared = re.findall(r"^REBATCH_API(?:_CHECKED)? [^(;]*\b(rebatch_\w+)\(", text, re.MULTILINE)
    assert sorted(name for name, _, _ in _library.FUNCTIONS) == sorted(declared)


def test_an_unknown_type_stops_the_build():
    with pytest.raises(SystemExit, match="has the type 'float'"):
        bindings.headers_for_ctypes(EXPORTED + "void rebatch_f(float x);")


def test_a_member_takes_a_function_and_a_wrong_name_is_an_error():
    ops = _library.StepOps(part=lambda first, _user: first + 3)
    assert ops.part(4, None) == 7
    with pytest.raises(AttributeError, match="zero_grads"):
        ops.zero_grads = None


def test_struct_size_is_set_and_the_rest_is_zero():
    options = _library.Options()
    assert options.struct_size == ctypes.sizeof(options)
    assert bytes(options)[8:] == bytes(len(bytes(options)) - 8)
    assert not _library.Options().on_event


def test_a_failed_call_raises_its_message():
    try:
        _library.parse_size("22 apples")
    except _library.Error as error:
        assert error.status is _library.Status.E_PARSE
        assert "22 apples" in str(error)
    else:
        raise AssertionError("no error")


def test_sizes():
    assert _library.parse_size("22GiB") == (22 << 30, 0)
    assert _library.parse_size("90%") == (0, 900)
    assert _library.parse_size(4096) == (4096, 0)
    assert _library.parse_size(None) == (0, 0)
    for wrong, kind in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        try:
            _library.parse_size(wrong)
        except kind:
            continue
        raise AssertionError(wrong)
