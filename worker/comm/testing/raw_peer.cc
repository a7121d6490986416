#include "worker/comm/testing/raw_peer.h"

#include "absl/strings/str_cat.h"
#include "base/protocol_version.h"

namespace ringleader::comm::testing {
namespace {

// How long rank 0 may take for what it is about to do.
constexpr absl::Duration kPatience = absl::Seconds(30);

}  // namespace

void RawPeer::Line::Send(uint64_t sequence, const std::string& payload, uint64_t total_bytes) {
  v1::Frame frame;
  frame.set_sequence(sequence);
  frame.set_total_bytes(total_bytes);
  frame.set_payload(payload);
  Write(frame);
}

void RawPeer::Line::Leave(const std::string& abort_reason) {
  v1::Frame frame;
  frame.set_leaving(true);
  frame.set_abort_reason(abort_reason);
  Write(frame);
}

grpc::Status RawPeer::Line::Finish() {
  writer_->WritesDone();
  return writer_->Finish();
}

RawPeer::RawPeer(uint64_t token) : token_(token) {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  address_ = absl::StrCat("127.0.0.1:", port);
}

std::unique_ptr<Communicator> RawPeer::Connect() {
  const auto listener =
      GrpcListener::Listen({.rank = 0, .size = 2, .fencing_token = token_}).value();
  Dial(listener->address());
  return listener->Connect({address_of_rank_0_, address_}).value();
}

void RawPeer::Dial(const std::string& address_of_rank_0) {
  address_of_rank_0_ = address_of_rank_0;
  stub_ = v1::PeerExchange::NewStub(
      grpc::CreateChannel(address_of_rank_0_, grpc::InsecureChannelCredentials()));
  life_line_ = Open(kLifeLine);
}

v1::Frame RawPeer::Hello(uint32_t stream, uint64_t token) {
  v1::Frame hello;
  hello.set_sender(1);
  hello.set_fencing_token(token);
  hello.set_channel(stream);
  hello.set_protocol_version(kProtocolVersion);
  return hello;
}

std::unique_ptr<RawPeer::Line> RawPeer::Open(uint32_t stream) {
  auto line = std::make_unique<Line>(*stub_);
  line->Write(Hello(stream, token_));
  return line;
}

std::vector<v1::Frame> RawPeer::Received() {
  absl::MutexLock lock(&mutex_);
  return received_;
}

void RawPeer::Refuse(const grpc::Status& answer) {
  absl::MutexLock lock(&mutex_);
  answer_ = answer;
}

void RawPeer::Pause() {
  absl::MutexLock lock(&mutex_);
  paused_ = true;
}

void RawPeer::Resume() {
  absl::MutexLock lock(&mutex_);
  paused_ = false;
}

bool RawPeer::AwaitReceived(size_t frames) {
  absl::MutexLock lock(&mutex_);
  const auto have_come = [this, frames]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return received_.size() >= frames;
  };
  return mutex_.AwaitWithTimeout(absl::Condition(&have_come), kPatience);
}

int RawPeer::BrokenOff(int streams) {
  absl::MutexLock lock(&mutex_);
  const auto have_ended = [this, streams]()
                              ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_ >= streams; };
  mutex_.AwaitWithTimeout(absl::Condition(&have_ended), kPatience);
  return ended_ >= streams ? broken_off_ : -1;
}

grpc::Status RawPeer::Stream(grpc::ServerContext* context, grpc::ServerReader<v1::Frame>* reader,
                             v1::StreamEnd* /*end*/) {
  v1::Frame frame;
  uint32_t stream = 0;
  for (bool first = true; reader->Read(&frame); first = false) {
    if (first) stream = frame.channel();
    frame.set_channel(stream);
    absl::MutexLock lock(&mutex_);
    received_.push_back(frame);
    if (!answer_.ok()) return answer_;
    mutex_.Await(absl::Condition(
        +[](bool* paused) { return !*paused; }, &paused_));
  }
  absl::MutexLock lock(&mutex_);
  ++ended_;
  broken_off_ += context->IsCancelled() ? 1 : 0;
  return grpc::Status::OK;
}

}  // namespace ringleader::comm::testing
