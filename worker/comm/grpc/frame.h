// Frames of comm.proto on the wire, without copying their payload: the sender's memory goes to the
// socket as it is, and the receiver copies once, from gRPC's slices to where the data belongs.
#pragma once

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <memory>

#include "absl/status/statusor.h"
#include "ringleader/v1/comm.pb.h"
#include "worker/comm/transport.h"

namespace ringleader::comm {

// `header` holds every field but the payload.
grpc::ByteBuffer EncodeFrame(const v1::Frame& header);

// A frame whose payload is the `bytes` at `offset` of `transfer`. They stay claimed until gRPC has
// let go of them. Call with the transfer claimed; this claim passes to the frame.
grpc::ByteBuffer EncodeFrame(const v1::Frame& header, const PendingTransferPtr& transfer,
                             size_t offset, size_t bytes);

// A frame that arrived: the header parsed, the payload still where gRPC put it.
class FrameReader {
 public:
  // INVALID_ARGUMENT unless `buffer` holds a Frame whose payload, if any, comes last. `buffer` must
  // outlive this.
  static absl::StatusOr<std::unique_ptr<FrameReader>> Parse(grpc::ByteBuffer* buffer);

  const v1::Frame& header() const { return header_; }
  size_t payload_bytes() const { return payload_bytes_; }
  // May be called once.
  void CopyPayload(char* destination);

 private:
  explicit FrameReader(grpc::ByteBuffer* buffer)
      : remaining_(buffer->Length()), reader_(buffer), coded_(&reader_) {}
  bool ParseHeader();

  const size_t remaining_;  // bytes of the frame
  grpc::ProtoBufferReader reader_;
  google::protobuf::io::CodedInputStream coded_;
  v1::Frame header_;
  size_t payload_bytes_ = 0;
};

}  // namespace ringleader::comm
