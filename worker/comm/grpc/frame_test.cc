// Frames on the wire: what protobuf would write, and nothing else is read.
#include "worker/comm/grpc/frame.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ringleader::comm {
namespace {

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// Parts stand for how a message may be cut up on its way.
grpc::ByteBuffer BufferOf(const std::vector<std::string>& parts) {
  std::vector<grpc::Slice> slices(parts.begin(), parts.end());
  return grpc::ByteBuffer(slices.data(), slices.size());
}

v1::Frame FullHeader() {
  v1::Frame header;
  header.set_sender(70'000);
  header.set_fencing_token(uint64_t{1} << 60);
  header.set_channel(0xffffffff);
  header.set_sequence(uint64_t{1} << 40);
  header.set_total_bytes(uint64_t{5} << 32);
  header.set_abort_reason("rank 3: found a NaN");
  header.set_leaving(true);
  header.set_protocol_version(9);
  return header;
}

TEST(FrameTest, EveryFieldOfAHeaderArrives) {
  grpc::ByteBuffer buffer = EncodeFrame(FullHeader());
  EXPECT_EQ(BytesOf(buffer), FullHeader().SerializeAsString());
  const auto frame = FrameReader::Parse(&buffer);
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ((*frame)->header().SerializeAsString(), FullHeader().SerializeAsString());
  EXPECT_EQ((*frame)->payload_bytes(), 0u);
}

TEST(FrameTest, APayloadIsTheAskedPartOfTheTransfer) {
  std::string text = "0123456789";
  const auto transfer = std::make_shared<PendingTransfer>(text.data(), text.size());
  v1::Frame header;
  header.set_sequence(3);
  header.set_total_bytes(10);
  ASSERT_TRUE(transfer->Claim());
  grpc::ByteBuffer buffer = EncodeFrame(header, transfer, 2, 5);
  // Protobuf reads what was written by hand.
  v1::Frame whole;
  ASSERT_TRUE(whole.ParseFromString(BytesOf(buffer)));
  EXPECT_EQ(whole.payload(), "23456");
  EXPECT_EQ(whole.sequence(), 3u);

  const auto frame = FrameReader::Parse(&buffer);
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_EQ((*frame)->header().total_bytes(), 10u);
  ASSERT_EQ((*frame)->payload_bytes(), 5u);
  std::string copy(5, ' ');
  (*frame)->CopyPayload(copy.data());
  EXPECT_EQ(copy, "23456");
}

TEST(FrameTest, APayloadStaysClaimedUntilGrpcLetsGoOfIt) {
  std::string text = "0123456789";
  const auto transfer = std::make_shared<PendingTransfer>(text.data(), text.size());
  ASSERT_TRUE(transfer->Claim());
  grpc::ByteBuffer buffer = EncodeFrame(v1::Frame(), transfer, 0, 10);
  transfer->FinishWhenReleased();
  ASSERT_TRUE(transfer->Claim()) << "the buffer still refers to the bytes";
  transfer->Release();
  buffer.Clear();
  EXPECT_FALSE(transfer->Claim());
  EXPECT_EQ(transfer->Wait(), absl::OkStatus());
}

TEST(FrameTest, ReadsAFrameHoweverItWasCutUp) {
  v1::Frame header = FullHeader();
  header.clear_abort_reason();
  header.clear_leaving();
  header.clear_protocol_version();  // before the payload, as all fields of data are
  v1::Frame whole = header;
  whole.set_payload("the payload");
  const std::string bytes = whole.SerializeAsString();
  for (size_t cut = 1; cut < bytes.size(); ++cut) {
    grpc::ByteBuffer buffer = BufferOf({bytes.substr(0, cut), bytes.substr(cut)});
    const auto frame = FrameReader::Parse(&buffer);
    ASSERT_TRUE(frame.ok()) << cut;
    EXPECT_EQ((*frame)->header().SerializeAsString(), header.SerializeAsString());
    ASSERT_EQ((*frame)->payload_bytes(), 11u) << cut;
    std::string payload(11, ' ');
    (*frame)->CopyPayload(payload.data());
    EXPECT_EQ(payload, "the payload") << cut;
  }
}

TEST(FrameTest, BytesBehindAPayloadAreRefused) {
  v1::Frame header;
  header.set_sequence(1);
  const std::string payload = std::string("\x32\x05", 2) + "12345";  // field 6 of 5 bytes
  const auto read = [&](const std::string& bytes) {
    grpc::ByteBuffer buffer = BufferOf({header.SerializeAsString(), bytes});
    return FrameReader::Parse(&buffer).status();
  };
  EXPECT_EQ(read(payload), absl::OkStatus());
  for (const std::string& wrong :
       {payload + '\0', payload + payload, payload + "\x40\x01", payload.substr(0, 6)}) {
    EXPECT_EQ(read(wrong).code(), absl::StatusCode::kInvalidArgument) << wrong.size();
    EXPECT_EQ(read(wrong).message(), "a peer sent bytes that are not a frame");
  }
}

TEST(FrameTest, FieldsOfANewerSenderArePassedOver) {
  // Field 15 in each wire type: a varint, 8 bytes, text, 4 bytes.
  for (const std::string& unknown :
       {std::string("\x78\x96\x01", 3), std::string("\x79") + "12345678",
        std::string("\x7a\x03") + "abc", std::string("\x7d") + "1234"}) {
    v1::Frame rest;
    rest.set_leaving(true);
    grpc::ByteBuffer buffer = BufferOf({"\x20\x07", unknown, rest.SerializeAsString()});
    const auto frame = FrameReader::Parse(&buffer);
    ASSERT_TRUE(frame.ok()) << static_cast<int>(unknown[0]);
    EXPECT_EQ((*frame)->header().sequence(), 7u);
    EXPECT_TRUE((*frame)->header().leaving());
  }
}

TEST(FrameTest, WhatBreaksOffIsNoFrame) {
  v1::Frame whole = FullHeader();
  whole.clear_leaving();
  whole.clear_protocol_version();  // so that text is last
  const std::string bytes = whole.SerializeAsString();
  size_t read = 0;
  for (size_t length = 0; length < bytes.size(); ++length) {
    grpc::ByteBuffer buffer = BufferOf({bytes.substr(0, length)});
    const auto frame = FrameReader::Parse(&buffer);
    if (!frame.ok()) continue;
    // Cut between two fields, it is a frame without the later ones.
    ++read;
    EXPECT_EQ((*frame)->header().SerializeAsString(), bytes.substr(0, length));
  }
  EXPECT_EQ(read, 6u);
  grpc::ByteBuffer groups = BufferOf({"\x0c"});  // the end of a group that never began
  EXPECT_FALSE(FrameReader::Parse(&groups).ok());
}

}  // namespace
}  // namespace ringleader::comm
