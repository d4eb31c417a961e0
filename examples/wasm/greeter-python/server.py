"""The Greeter service in Python. `tripod component generate` writes the types of its messages into gen."""

import os
import time

from componentize_py_types import Err
from wit_world import exports
from wit_world.imports import greet_v1, greeter_streams, response
from wit_world.imports.tripod_grpc import Context, Status

INVALID_ARGUMENT = 3
HELLO = {greet_v1.Language_German: "Hallo", greet_v1.Language_French: "Bonjour"}


def field(number: int, value: bytes) -> bytes:
    """A protobuf field of up to 127 bytes: its number and wire type, its length and its bytes."""
    return bytes([number << 3 | 2, len(value)]) + value


def wrong_field(name: str) -> bytes:
    """A google.protobuf.Any with a StringValue that names the wrong field."""
    return field(1, b"type.googleapis.com/google.protobuf.StringValue") + field(2, field(1, name.encode()))


def greet(name: str, language: greet_v1.Language) -> greet_v1.HelloReply:
    if not name:
        raise Err(Status(INVALID_ARGUMENT, "name: must not be empty", [wrong_field("name")]))
    return greet_v1.HelloReply(f"{HELLO.get(type(language), 'Hello')}, {name}!", os.environ.get("POD_NAME", ""))


class Greeter(exports.Greeter):
    def say_hello(self, context: Context, request: greet_v1.HelloRequest) -> greet_v1.HelloReply:
        for entry in context.metadata:
            if entry.key == "x-request-id":
                response.set_header(entry)
            if entry.key == "x-trace-bin":
                response.set_trailer(entry)
        print("SayHello", request.name, "from", context.peer)
        return greet(request.name, request.language)

    def countdown(self, context: Context, request: greet_v1.CountdownRequest, replies: greeter_streams.CountdownReplyWriter) -> None:
        print("Countdown from", request.from_)
        for number in range(request.from_, -1, -1):
            replies.send(greet_v1.CountdownReply(number))
            time.sleep(request.interval_ms / 1000)

    def collect(self, context: Context, requests: greeter_streams.HelloRequestReader) -> greet_v1.HelloReply:
        names, language = [], greet_v1.Language_Unspecified()
        while (request := requests.next()) is not None:
            names.append(request.name)
            language = request.language
        print("Collect", ", ".join(names))
        return greet(", ".join(names), language)

    def chat(self, context: Context, requests: greeter_streams.HelloRequestReader, replies: greeter_streams.HelloReplyWriter) -> None:
        print("Chat")
        while (request := requests.next()) is not None:
            replies.send(greet(request.name, request.language))
