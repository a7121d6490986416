#!/usr/bin/env python3
"""A collector of traces that speaks OpenTelemetry's own definition of OTLP over gRPC (opentelemetry-proto).

otlp_collector.py PORT FILE. Appends each span that it takes to FILE as a line of JSON. A field that the definition does not
know ends it."""

import concurrent.futures
import json
import os
import sys

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.unknown_fields import UnknownFieldSet
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


def check_known(message):
    if len(UnknownFieldSet(message)):
        print(f"{message.DESCRIPTOR.full_name} has fields that OTLP does not know", file=sys.stderr, flush=True)
        os._exit(1)  # sys.exit would end the call alone
    for field, value in message.ListFields():
        if field.message_type:
            for part in value if field.is_repeated else [value]:
                check_known(part)


def plain(attributes):
    return {a.key: next(iter(MessageToDict(a.value).values()), "") for a in attributes}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):

    def __init__(self, path):
        self.file = open(path, "a", encoding="utf-8")

    def Export(self, request, context):
        check_known(request)
        for part in request.resource_spans:
            for scope in part.scope_spans:
                for span in scope.spans:
                    json.dump({"service": plain(part.resource.attributes)["service.name"], "name": span.name,
                               "trace": span.trace_id.hex(), "id": span.span_id.hex(), "parent": span.parent_span_id.hex(),
                               "begin": span.start_time_unix_nano, "end": span.end_time_unix_nano,
                               "attributes": plain(span.attributes)}, self.file)
                    self.file.write("\n")
        self.file.flush()
        return trace_service_pb2.ExportTraceServiceResponse()


def main():
    port, path = sys.argv[1:3]
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(max_workers=1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(path), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
