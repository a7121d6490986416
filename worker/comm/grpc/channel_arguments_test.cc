// What ranks set of gRPC and no transfer between two healthy ones shows.
#include "worker/comm/grpc/channel_arguments.h"

#include <grpc/grpc.h>

#include <cstring>

#include "gtest/gtest.h"

namespace ringleader::comm {
namespace {

// The number that is set last under a name, as gRPC takes it; -1 if there is none.
int Number(const grpc::ChannelArguments& arguments, const char* name) {
  int number = -1;
  const grpc_channel_args all = arguments.c_channel_args();
  for (size_t i = 0; all.args != nullptr && i < all.num_args; ++i) {
    if (std::strcmp(all.args[i].key, name) != 0) continue;
    EXPECT_EQ(all.args[i].type, GRPC_ARG_INTEGER) << name;
    number = all.args[i].value.integer;
  }
  return number;
}

// A node that loses its power, or a link that goes down, ends no connection: gRPC asks the peer,
// with nothing under way, too, and as often as it likes.
TEST(ChannelArgumentsTest, ASilentPeerIsNoticedWithin20Seconds) {
  const grpc::ChannelArguments arguments = PeerChannelArguments();
  const int every = Number(arguments, GRPC_ARG_KEEPALIVE_TIME_MS);
  const int patience = Number(arguments, GRPC_ARG_KEEPALIVE_TIMEOUT_MS);
  EXPECT_GT(every, 0);
  EXPECT_GT(patience, 0);
  EXPECT_LE(every + patience, 20'000);
  EXPECT_EQ(Number(arguments, GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA), 0);
}

// What a server that is built with it takes.
class Builder : public grpc::ServerBuilder {
 public:
  grpc::ChannelArguments Arguments() {
    grpc::ChannelArguments arguments;
    for (grpc::ServerBuilderOption* option : options()) option->UpdateArguments(&arguments);
    return arguments;
  }
};

// Ranks may compute for minutes between two transfers. By default a server breaks the connection of
// a client that asks so often.
TEST(ChannelArgumentsTest, APeerThatAsksWhileNothingIsUnderWayIsAnswered) {
  Builder builder;
  SetPeerServerArguments(&builder);
  const grpc::ChannelArguments server = builder.Arguments();
  EXPECT_EQ(Number(server, GRPC_ARG_HTTP2_MAX_PING_STRIKES), 0) << "any number";
  const int often = Number(server, GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS);
  EXPECT_GE(often, 0);
  EXPECT_LE(often, Number(PeerChannelArguments(), GRPC_ARG_KEEPALIVE_TIME_MS));
}

// By default two servers of one machine may come to share a port, and each other's peers.
TEST(ChannelArgumentsTest, APortIsOneRanksAlone) {
  Builder builder;
  SetPeerServerArguments(&builder);
  EXPECT_EQ(Number(builder.Arguments(), GRPC_ARG_ALLOW_REUSEPORT), 0);
}

// By default gRPC puts all streams to an address on one connection, where they wait for each other.
TEST(ChannelArgumentsTest, EachStreamHasAConnectionOfItsOwn) {
  EXPECT_EQ(Number(PeerChannelArguments(), GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL), 1);
}

// gRPC keeps a copy of what it may have to send again, or the caller's memory itself.
TEST(ChannelArgumentsTest, NothingIsKeptToBeSentAgain) {
  EXPECT_EQ(Number(PeerChannelArguments(), GRPC_ARG_ENABLE_RETRIES), 0);
}

}  // namespace
}  // namespace ringleader::comm
