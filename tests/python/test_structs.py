"""The structs, enums and functions of python/rebatch/_library.py are those of the C headers."""

import ctypes
import pathlib
import re
import subprocess

from rebatch import _library

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = '#include <stdio.h>\n#include <stddef.h>\n#include "rebatch/rebatch.h"\n'
OPAQUE = {"rebatch", "rebatch_config", "rebatch_device", "rebatch_pool", "rebatch_stream_object"}


def compiler(*arguments, source):
    """The output of the C compiler for `source`."""
    command = ["cc", "-std=c11", f"-I{ROOT}/include", *arguments, "-x", "c", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def header():
    """The public headers after the preprocessor."""
    return compiler("-E", "-P", source='#include "rebatch/rebatch.h"\n')


def c_prints(tmp_path, lines):
    """What a C program with these statements prints, as a dictionary of numbers."""
    program = tmp_path / "print"
    source = INCLUDE + "int main(void)\n{\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    compiler("-o", str(program), source=source)
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in (line.split() for line in output.splitlines())}


def member_names(body):
    """The names of the members in the body of a struct, in order."""
    names = []
    for declaration in body.split(";"):
        function = re.search(r"\(\*(\w+)\)\s*\(", declaration)
        plain = re.search(r"(\w+)\s*(\[[^\]]*\])?\s*$", declaration.strip())
        if function or plain:
            names.append((function or plain).group(1))
    return names


def structs_of_header():
    """The structs of the headers, with their members."""
    found = re.findall(r"typedef struct (rebatch\w*) \{(.*?)\}\s*\1;", header(), re.DOTALL)
    return {name: member_names(body) for name, body in found}


def enums_of_header():
    """The enums of the headers, with the names of their constants."""
    enums = {}
    for name, body in re.findall(r"enum (rebatch\w*)\s*\{(.*?)\}", header(), re.DOTALL):
        constants = re.findall(r"(?:^|,)\s*(REBATCH_\w+)", body)
        enums[name] = [c for c in constants if not c.endswith("_")]
    return enums


def test_structs_have_the_members_of_the_headers():
    theirs = structs_of_header()
    assert _library.STRUCTS
    for cls, name in _library.STRUCTS:
        assert [field[0] for field in cls._fields_] == theirs[name], name


def test_structs_have_the_layout_of_the_headers(tmp_path):
    expected, lines = {}, []

    def expect(key, expression, value):
        expected[key] = value
        lines.append(f'printf("{key} %zu\\n", (size_t)({expression}));')

    for cls, name in _library.STRUCTS:
        expect(name, f"sizeof({name})", ctypes.sizeof(cls))
        for field, _ in cls._fields_:
            descriptor = getattr(cls, field)
            expect(f"{name}.{field}", f"offsetof({name}, {field})", descriptor.offset)
            expect(f"{name}.{field}:size", f"sizeof((({name} *)0)->{field})", descriptor.size)
    assert c_prints(tmp_path, lines) == expected


def test_enums_have_the_constants_of_the_headers():
    theirs = enums_of_header()
    assert _library.ENUMS
    for cls, name, prefix in _library.ENUMS:
        assert {prefix + member for member in cls.__members__} == set(theirs[name]), name


def test_enums_have_the_values_of_the_headers(tmp_path):
    expected = {}
    for cls, _, prefix in _library.ENUMS:
        expected.update({prefix + name: int(value) for name, value in cls.__members__.items()})
    lines = [f'printf("{name} %d\\n", (int){name});' for name in expected]
    assert c_prints(tmp_path, lines) == expected


def test_array_lengths_are_those_of_the_headers(tmp_path):
    names = ["OOM_TAGS", "ALLOWED_SIZES"]
    lines = [f'printf("{name} %d\\n", (int)REBATCH_{name});' for name in names]
    assert c_prints(tmp_path, lines) == {name: getattr(_library, name) for name in names}


def parameters_of(declaration):
    """How many parameters the C function has."""
    inside = declaration.strip()
    if inside == "void":
        return 0
    depth, count = 0, 1
    for character in inside:
        depth += (character == "(") - (character == ")")
        count += character == "," and depth == 0
    return count


def test_functions_have_the_arguments_of_the_headers():
    text = header()
    for name, result, arguments in _library.FUNCTIONS:
        match = re.search(rf"(\w+[ *]+){name}\((.*?)\);", text, re.DOTALL)
        assert match, name
        assert (result is None) == (match.group(1).strip() == "void"), name
        assert parameters_of(match.group(2)) == len(arguments), name


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
