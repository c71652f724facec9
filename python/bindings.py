"""Makes rebatch/_headers.py of the C headers: their enums, structs and functions for ctypes.

native.py writes it in each build, beside the library that it is for. It reads what the compiler's
preprocessor leaves of the headers, and stops at a type that it does not know.

    cc -E -P -Iinclude -x c include/rebatch/rebatch.h | python3 python/bindings.py
"""

import os
import re
import sys

_SCALARS = {"int": "c_int", "unsigned": "c_uint", "char": "c_char", "double": "c_double"}
_SCALARS |= {"size_t": "c_size_t", "_Bool": "c_bool"}
_SCALARS |= {f"uint{bits}_t": f"c_uint{bits}" for bits in (8, 16, 32, 64)}
_OPAQUE = {"void", "jmp_buf"}
_START = '''"""The headers in include/rebatch, made by python/bindings.py."""

import ctypes as C
from enum import IntEnum

from rebatch._c_struct import Struct
'''


def headers_for_ctypes(text: str) -> str:
    """The module for these preprocessed headers."""
    return _Headers(text).module()


def _class_name(c_name: str) -> str:
    return c_name.removeprefix("rebatch").title().replace("_", "")


class _Headers:
    def __init__(self, text: str):
        self._text = text
        self._constants: dict[str, int] = {}
        # By what is behind `typedef`: "struct rebatch_stream_object *" of rebatch_stream.
        self._aliases = {n: t for t, n in re.findall(r"typedef ([\w ]+\**) ?(rebatch\w*);", text)}
        self._enums = re.findall(r"enum (rebatch\w+)\s*\{(.*?)\}", text, re.DOTALL)
        structs = r"typedef struct (rebatch\w*) \{(.*?)\}\s*\1;"
        self._structs = dict(re.findall(structs, text, re.DOTALL))
        self._written: dict[str, str] = {}  # of these, what a function or another one has

    def module(self) -> str:
        enums = [self._enum(name, body) for name, body in self._enums]
        visible = r'__attribute__\(\(visibility\("default"\)\)\) '
        functions = re.findall(visible + r"([^;{]*?)(rebatch_\w+)\(([^;{]*)\);", self._text)
        lines = ["# Name, result, arguments.", "FUNCTIONS = ["]
        for result, name, arguments in functions:
            types = ", ".join(self._parameters(arguments))
            lines.append(f'    ("{name}", {self._result(result)}, [{types}]),')
        parts = [_START, *enums, *self._written.values(), "\n".join([*lines, "]\n"])]
        return "\n\n".join(parts)

    def _enum(self, c_name: str, body: str) -> str:
        values, last = {}, -1
        for constant, number in re.findall(r"(REBATCH_\w+)(?: = (\w+))?", body):
            last = int(number, 0) if number else last + 1
            if not constant.endswith("_"):
                values[constant] = last
        self._constants.update(values)
        common = os.path.commonprefix(list(values))
        prefix = common[: common.rindex("_") + 1]  # REBATCH_, or REBATCH_PHASE_
        lines = [f"class {_class_name(c_name)}(IntEnum):", f'    """{c_name}: {prefix}..."""\n']
        lines += [f"    {constant[len(prefix) :]} = {value}" for constant, value in values.items()]
        return "\n".join(lines)

    def _struct(self, c_name: str, body: str) -> str:
        lines = [
            f"class {_class_name(c_name)}(Struct):",
            f'    """{c_name}"""\n',
            "    _fields_ = [",
        ]
        for declaration in body.split(";")[:-1]:
            name, kind = self._declared(declaration)
            lines.append(f'        ("{name}", {kind}),')
        return "\n".join([*lines, "    ]"])

    def _declared(self, declaration: str) -> tuple[str, str]:
        """Name and type of a member or parameter."""
        text = " ".join(declaration.split())
        function = re.fullmatch(r"(.+?) ?\(\*(\w+)\)\((.*)\)", text)
        if function:
            result, name, arguments = function.groups()
            types = ", ".join([self._result(result), *self._parameters(arguments)])
            return name, f"C.CFUNCTYPE({types})"
        declared = re.fullmatch(r"(.+?)(\w+)(?:\[(\w+)\])?", text)
        if not declared:
            raise SystemExit(f"rebatch: a header declares '{text}': expected a type and a name")
        of, name, length = declared.groups()
        array = f" * {self._constants.get(length, length)}" if length else ""
        return name, self._type(of) + array

    def _parameters(self, text: str) -> list[str]:
        found = re.split(r",(?![^()]*\))", text)
        return [] if text == "void" else [self._declared(parameter)[1] for parameter in found]

    def _result(self, text: str) -> str:
        of = re.sub(r"__attribute__\(\(\w+\)\)", "", text).strip()
        return "None" if of == "void" else self._type(of)

    def _type(self, text: str) -> str:
        stars = text.count("*")
        name = text.replace("*", "").replace("const ", "").strip()
        while name in self._aliases and name not in self._structs:
            stars += self._aliases[name].count("*")
            name = self._aliases[name].replace("*", "").strip()
        if name in self._structs:
            kind = _class_name(name)
            if name not in self._written:
                self._written[name] = self._struct(name, self._structs[name])
        elif name in _SCALARS:
            kind = f"C.{_SCALARS[name]}"
        elif name in dict(self._enums):
            kind = "C.c_int"
        elif stars and (name in _OPAQUE or name.startswith("struct rebatch")):
            kind, stars = "C.c_void_p", stars - 1
        else:
            raise SystemExit(
                f"rebatch: a header has the type '{name}': expected one of bindings.py"
            )
        if stars and name == "char":
            kind, stars = "C.c_char_p", stars - 1
        return "C.POINTER(" * stars + kind + ")" * stars


if __name__ == "__main__":
    print(headers_for_ctypes(sys.stdin.read()), end="")
