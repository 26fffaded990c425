"""Server reflection under both names: `grpc.reflection.v1`, and `v1alpha`, which older tools use.

Both differ only in the name of their package, and Python's package has only the older one.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

_OLD, _NEW = "grpc.reflection.v1alpha", "grpc.reflection.v1"
NAME = f"{_NEW}.ServerReflection"


def serve(names: Iterable[str], server: grpc.aio.Server) -> None:
    """Has a server tell of the services with these full names, and of reflection itself."""
    _describe()
    servicer = reflection.aio.ReflectionServicer((*names, NAME, reflection.SERVICE_NAME))
    for name in (NAME, reflection.SERVICE_NAME):
        info = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": info})
        server.add_generic_rpc_handlers((handler,))


def _describe() -> None:
    """Makes the newer name one that can be asked about."""
    text = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(text)
    text.name, text.package = "grpc/reflection/v1/reflection.proto", _NEW
    for message in text.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(_OLD, _NEW)
    for method in text.service[0].method:
        method.input_type = method.input_type.replace(_OLD, _NEW)
        method.output_type = method.output_type.replace(_OLD, _NEW)
    descriptor_pool.Default().Add(text)
