#include "worker/comm/grpc/frame.h"

#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/slice.h>

#include <string>

namespace ringleader::comm {
namespace {

using google::protobuf::internal::WireFormatLite;

grpc::Slice HeaderSlice(const v1::Frame& header, size_t payload_bytes) {
  std::string text = header.SerializeAsString();
  if (payload_bytes > 0) {
    // The tag and length of the payload field; the payload itself follows as a slice of its own.
    google::protobuf::io::StringOutputStream stream(&text);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.WriteTag(WireFormatLite::MakeTag(v1::Frame::kPayloadFieldNumber,
                                           WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
    coded.WriteVarint64(payload_bytes);
  }
  return grpc::Slice(text);
}

void ReleaseTransfer(void* holder) {
  auto* transfer = static_cast<PendingTransferPtr*>(holder);
  (*transfer)->Release();
  delete transfer;
}

}  // namespace

grpc::ByteBuffer EncodeFrame(const v1::Frame& header) {
  const grpc::Slice slice = HeaderSlice(header, 0);
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer EncodeFrame(const v1::Frame& header, const PendingTransferPtr& transfer,
                             size_t offset, size_t bytes) {
  const grpc::Slice slices[] = {HeaderSlice(header, bytes),
                                grpc::Slice(transfer->data + offset, bytes, ReleaseTransfer,
                                            new PendingTransferPtr(transfer))};
  return grpc::ByteBuffer(slices, 2);
}

absl::StatusOr<std::unique_ptr<FrameReader>> FrameReader::Parse(grpc::ByteBuffer* buffer) {
  std::unique_ptr<FrameReader> frame(new FrameReader(buffer));
  if (!frame->ParseHeader()) {
    return absl::InvalidArgumentError("a peer sent bytes that are not a frame");
  }
  return frame;
}

bool FrameReader::ParseHeader() {
  constexpr auto kText = WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
  while (true) {
    const uint32_t tag = coded_.ReadTag();
    if (tag == 0) return coded_.ConsumedEntireMessage();
    uint64_t value = 0;
    if (tag == WireFormatLite::MakeTag(v1::Frame::kPayloadFieldNumber, kText)) {
      if (!coded_.ReadVarint64(&value)) return false;
      payload_bytes_ = value;
      return coded_.CurrentPosition() + payload_bytes_ == remaining_;
    }
    if (WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_VARINT) {
      if (!coded_.ReadVarint64(&value)) return false;
      SetNumber(WireFormatLite::GetTagFieldNumber(tag), value);
    } else if (tag == WireFormatLite::MakeTag(v1::Frame::kAbortReasonFieldNumber, kText)) {
      if (!WireFormatLite::ReadString(&coded_, header_.mutable_abort_reason())) return false;
    } else if (!WireFormatLite::SkipField(&coded_, tag)) {  // a newer sender's
      return false;
    }
  }
}

void FrameReader::SetNumber(int field, uint64_t value) {
  switch (field) {
    case v1::Frame::kSenderFieldNumber:
      return header_.set_sender(static_cast<uint32_t>(value));
    case v1::Frame::kFencingTokenFieldNumber:
      return header_.set_fencing_token(value);
    case v1::Frame::kChannelFieldNumber:
      return header_.set_channel(static_cast<uint32_t>(value));
    case v1::Frame::kSequenceFieldNumber:
      return header_.set_sequence(value);
    case v1::Frame::kTotalBytesFieldNumber:
      return header_.set_total_bytes(value);
    case v1::Frame::kLeavingFieldNumber:
      return header_.set_leaving(value != 0);
    case v1::Frame::kProtocolVersionFieldNumber:
      return header_.set_protocol_version(static_cast<uint32_t>(value));
    default:
      return;  // a newer sender's
  }
}

void FrameReader::CopyPayload(char* destination) {
  coded_.ReadRaw(destination, static_cast<int>(payload_bytes_));
}

}  // namespace ringleader::comm
