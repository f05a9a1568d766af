"""Whether a chat template wants message content as one string or as a list of parts, read from the template's syntax.

Pure. The engine decides the same way (vLLM `--chat-template-content-format auto`): list if some loop runs over
  1. `message.content` / `message['content']`, where message is the variable of a loop over `messages` (or over a
     variable assigned from messages, filtered or sliced too),
  2. a variable named `content`, outside any macro,
  3. a macro's parameter that gets such a message's content in some call of the macro;
string otherwise, where the template does not parse, and where messages or one of them are unpacked into anything but a
plain variable (the engine gives up there).
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


class _Unclear(Exception):
    pass


def loops_over(tree: nodes.Template) -> frozenset[str]:
    """Names of variables whose content some loop runs over, wherever they come from."""
    return frozenset(
        name
        for loop in tree.find_all(nodes.For)
        for name in {node.name for node in loop.iter.find_all(nodes.Name)}
        if _reads(loop.iter, name, "content")
    )


def wants_list(tree: nodes.Template) -> bool:
    """True if the template loops over content parts. O(nodes squared in the worst case), once per template."""
    try:
        return _loops_over_content(tree)
    except _Unclear:
        return False


def _loops_over_content(tree: nodes.Template) -> bool:
    message_names = _message_names(tree)
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        fed = set(_content_parameters(tree, macro, message_names))
        for loop in macro.find_all(nodes.For):
            in_macros[id(loop)] = fed
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name, "content") for name in message_names):
            return True
        if isinstance(loop.iter, nodes.Name):
            fed_here = in_macros.get(id(loop))
            if loop.iter.name in (fed_here if fed_here is not None else ("content",)):
                return True
    return False


def _message_names(tree: nodes.Template) -> set[str]:
    """Variables of loops over the conversation."""
    lists = _aliases(tree, "messages")
    return {
        _plain_name(loop.target) for loop in tree.find_all(nodes.For) if any(_reads(loop.iter, name) for name in lists)
    }


def _plain_name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unclear
    return target.name


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """`name` and every variable assigned from it, directly or over others."""
    found, queue = {name}, [name]
    assigns = list(tree.find_all(nodes.Assign))
    while queue:
        current = queue.pop()
        for assign in assigns:
            if _reads(assign.node, current):
                target = _plain_name(assign.target)
                if target not in found:
                    found.add(target)
                    queue.append(target)
    return found


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, message_names: set[str]) -> Iterator[str]:
    parameters = [argument.name for argument in macro.args]
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(parameters, call.args, strict=False), *((pair.key, pair.value) for pair in call.kwargs)]
        for parameter, value in given:
            if parameter in parameters and any(_reads(value, name, "content") for name in message_names):
                yield parameter


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """True if the expression is variable `name` (its item or attribute `key`), through filters, tests and slices."""
    while True:
        if isinstance(node, (nodes.Filter, nodes.Test)) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            break
    if key is not None:
        if isinstance(node, nodes.Getattr):
            attribute: object = node.attr
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            attribute = node.arg.value
        else:
            return False
        if attribute != key:
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
