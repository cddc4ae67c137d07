"""ScriptEdits: small replacements in the text of a script; the rest stays as it is, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from fleet.migrate.script_source import ScriptSource


@dataclass(frozen=True)
class PortFinding:
    """A place of the script that needs a look.

    Attributes:
        line: its line, from 1.
        what: the code there.
        why: the reason why it was not moved, or needs a look.
        todo: the work by hand.
        by_hand: False for a note: the line works as it is.
    """

    line: int
    what: str
    why: str
    todo: str
    by_hand: bool = True


@dataclass
class ScriptEdits:
    """Edits of one script, applied together by :meth:`text`.

    A replacement inside a statement that is removed is dropped with it.
    """

    source: ScriptSource
    findings: list[PortFinding] = field(default_factory=list)
    _spans: list[tuple[int, int, str]] = field(default_factory=list)
    _removed: list[cst.CSTNode] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether there is an edit."""
        return bool(self._spans or self._removed)

    def hand(self, node: cst.CSTNode, why: str, todo: str) -> None:
        """Notes a construct that the user moves by hand."""
        self._find(node, why, todo, by_hand=True)

    def note(self, node: cst.CSTNode, why: str, todo: str = "") -> None:
        """Adds a note about a construct that works."""
        self._find(node, why, todo, by_hand=False)

    def _find(self, node: cst.CSTNode, why: str, todo: str, *, by_hand: bool) -> None:
        what = self.source.code(node).splitlines()[0].strip()
        finding = PortFinding(self.source.line(node), what[:79], why, todo, by_hand)
        if finding not in self.findings:
            self.findings.append(finding)

    def replace(self, node: cst.CSTNode, text: str) -> None:
        """Puts ``text`` in the place of ``node``."""
        start, end = self.source.span(node)
        self.replace_span(start, end, text)

    def replace_span(self, start: int, end: int, text: str) -> None:
        """Puts ``text`` in the place of these bytes."""
        self._spans.append((start, end, text))

    def unwrap(self, call: cst.Call, before: str = "", after: str = "") -> None:
        """Leaves the first argument of ``call`` alone, between ``before`` and ``after``."""
        inner = call.args[0].value
        plain = isinstance(inner, cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.Tuple)
        opening, closing = ("", "") if plain or not (before or after) or inner.lpar else ("(", ")")
        start, end = self.source.span(call)
        first, last = self._outer_span(inner)
        self.replace_span(start, first, before + opening)
        self.replace_span(last, end, closing + after)

    def call_method(self, node: cst.BaseExpression, method: str) -> None:
        """Appends a call such as ``.flatten()`` to an expression."""
        plain = isinstance(node, cst.Name | cst.Attribute | cst.Call | cst.Subscript) or bool(node.lpar)
        start, end = self._outer_span(node)
        if not plain:
            self.replace_span(start, start, "(")
        self.replace_span(end, end, method if plain else f"){method}")

    def _outer_span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Returns the span of ``node`` with the brackets around it."""
        start, end = self.source.span(node)
        for _ in getattr(node, "lpar", ()):
            start = self.source.data.rindex(b"(", 0, start)
            end = self.source.data.index(b")", end) + 1
        return start, end

    def drop_arguments(self, call: cst.Call, dropped: list[cst.Arg]) -> None:
        """Removes arguments of ``call`` with the commas before or after them."""
        kept = [place for place, found in enumerate(call.args) if found not in dropped]
        spans = [self.source.span(found) for found in call.args]
        ends = [max(end, self._outer_span(found.value)[1]) for (_, end), found in zip(spans, call.args, strict=True)]
        for place, found in enumerate(call.args):
            if found not in dropped:
                continue
            if not kept:
                self.replace_span(spans[place][0], ends[place], "")
                if place + 1 < len(call.args):
                    self.replace_span(ends[place], spans[place + 1][0], "")
            elif place < kept[0]:
                self.replace_span(spans[place][0], spans[place + 1][0], "")
            else:
                self.replace_span(ends[place - 1], ends[place], "")

    def add_argument(self, call: cst.Call, text: str, before: cst.Arg | None = None) -> None:
        """Adds an argument at the end of ``call``, or before one of its arguments."""
        if before is not None:
            start = self.source.span(before)[0]
            self.replace_span(start, start, f"{text}, ")
            return
        end = self.source.span(call)[1] - 1
        if call.args:
            last = max(self.source.span(call.args[-1])[1], self._outer_span(call.args[-1].value)[1])
            self.replace_span(last, last, f", {text}")
        else:
            self.replace_span(end, end, text)

    # ---- statements ----------------------------------------------------------------------------------------------

    def insert_before(self, node: cst.CSTNode, *lines: str) -> bool:
        """Inserts lines before the statement of ``node``; returns False where it shares its line."""
        statement = self.source.statement(node)
        if statement is None:
            return False
        start = self.line_start(self.source.span(statement)[0])
        if isinstance(statement, cst.FunctionDef | cst.ClassDef) and statement.decorators:
            start = self.line_start(self.source.span(statement.decorators[0])[0])
        self.replace_span(start, start, self._lines(self.indent(statement), lines))
        return True

    def insert_after(self, node: cst.CSTNode, *lines: str, first: bool = False) -> bool:
        """Inserts lines after the statement of ``node``; returns False where it shares its line.

        With ``first`` they stand before the insertions of other edits there.
        """
        statement = self.source.statement(node)
        if statement is None:
            return False
        inside = [n for n in self.source.inside(statement) if isinstance(n, cst.SimpleStatementLine)]
        end = max(self.source.span(found)[1] for found in (inside or (statement,)))
        data = self.source.data
        stop = data.find(b"\n", end)
        before = "" if stop >= 0 else self.newline
        stop = len(data) if stop < 0 else stop + 1
        insertion = (stop, stop, before + self._lines(self.indent(statement), lines))
        self._spans.insert(0 if first else len(self._spans), insertion)
        return True

    def insert_first(self, block: cst.BaseSuite, *lines: str) -> bool:
        """Inserts lines as the first statements of ``block``, after its docstring."""
        if not isinstance(block, cst.IndentedBlock) or not block.body:
            return False
        first = block.body[0]
        small = first.body[0] if isinstance(first, cst.SimpleStatementLine) else None
        is_text = isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString | cst.ConcatenatedString)
        if is_text:
            return self.insert_after(first, *lines)
        return self.insert_before(first, *lines)

    def guard(self, node: cst.CSTNode, condition: str) -> bool:
        """Puts the simple statement of ``node`` under ``if condition:``; returns False where that is not possible."""
        statement = self.source.statement(node)
        if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
            return False
        start, end = self.source.span(statement)
        indent = self.indent(statement)
        step = self.indent_step
        self.replace_span(start, start, f"if {condition}:{self.newline}{indent}{step}")
        inner = self.source.inside(statement)
        texts = [self.source.span(n) for n in inner if isinstance(n, cst.SimpleString | cst.FormattedString)]
        place = self.source.data.find(b"\n", start, end)
        while place >= 0:  # further lines of the statement, but not those of a long string
            if not any(a < place < b for a, b in texts):
                self.replace_span(place + 1, place + 1, step)
            place = self.source.data.find(b"\n", place + 1, end)
        return True

    def remove(self, node: cst.CSTNode) -> None:
        """Removes the small statement around ``node``, and its line where it is alone."""
        above = (node, *self.source.above(node))
        small = next(found for found in above if isinstance(found, cst.BaseSmallStatement))
        line = self.source.parent(small)
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
            self._removed.append(line)
        else:
            self.replace(small, "pass")

    def indent(self, statement: cst.CSTNode) -> str:
        """Returns the white space before a statement."""
        start = self.source.span(statement)[0]
        before = self.source.data[self.line_start(start) : start].decode()
        return before[: len(before) - len(before.lstrip())]

    def line_start(self, offset: int) -> int:
        """Returns where the line of ``offset`` starts."""
        return self.source.data.rfind(b"\n", 0, offset) + 1

    @property
    def newline(self) -> str:
        """The line end of the script."""
        return "\r\n" if b"\r\n" in self.source.data else "\n"

    @property
    def indent_step(self) -> str:
        """The indentation of a block in the script: a tab, or its number of spaces."""
        return self.source.module.default_indent

    def _lines(self, indent: str, lines: tuple[str, ...]) -> str:
        return "".join(f"{indent}{line}{self.newline}" for line in lines)

    def covers(self, node: cst.CSTNode) -> bool:
        """Returns whether an edit replaces or removes ``node``."""
        start, end = self.source.span(node)
        spans = [(a, b) for a, b, _ in self._spans if a < b] + [self.source.span(line) for line in self._removed]
        return any(a <= start and end <= b for a, b in spans)

    # ---- the result ----------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Returns the script with every edit applied."""
        spans = list(self._spans)
        gone = []
        for statement in self._removed:
            start, end = self.source.span(statement)
            block = self.source.parent(statement)
            body = block.body if isinstance(block, cst.IndentedBlock) else ()
            gone.append((start, end))
            # An empty block would be a syntax error, unless an insertion fills it.
            fills = any(self.line_start(start) <= s <= end and new for s, e, new in spans if s == e)
            if body and all(other in self._removed for other in body) and statement is body[0] and not fills:
                spans.append((start, end, "pass"))
            else:
                spans.append((self.line_start(start), self._end_of(start, end, spans), ""))
                gone[-1] = (self.line_start(start), end)
        return self._applied(spans, gone).decode()

    def _end_of(self, start: int, end: int, spans: list[tuple[int, int, str]]) -> int:
        """Returns the end of a statement's removal: its line, with one of two blank lines around it."""
        data = self.source.data
        stop = data.find(b"\n", end)
        if stop < 0:
            return len(data)
        if any(a == b == stop + 1 for a, b, _ in spans):  # something takes its place
            return stop + 1
        following = data.find(b"\n", stop + 1)
        before = data[: self.line_start(start)].splitlines()
        if before and not before[-1].strip() and following >= 0 and not data[stop:following].strip():
            return following + 1
        return stop + 1

    def _applied(self, spans: list[tuple[int, int, str]], gone: list[tuple[int, int]]) -> bytes:
        data = self.source.data
        texts = []
        place = 0
        # By place; at one place insertions come before replacements, each in the order in which they were asked for.
        order = sorted(enumerate(spans), key=lambda pair: (pair[1][0], pair[1][1] != pair[1][0], pair[0]))
        for _, (start, end, text) in order:
            inside = any(a <= start and end <= b and (start, end) != (a, b) for a, b in gone)
            removal = any(start <= a and b <= end for a, b in gone)
            if inside and not removal and (start != end or any(a < start < b for a, b in gone)):
                continue
            if start < end <= place:  # inside of what another edit has replaced
                continue
            if start < place:
                raise AssertionError(f"two edits of the same text, at byte {start}")
            texts += [data[place:start], text.encode()]
            place = end
        return b"".join([*texts, data[place:]])
