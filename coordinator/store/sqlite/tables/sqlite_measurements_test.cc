// What trainers measured, and jobs' plans, as the store keeps them.
#include <SQLiteCpp/SQLiteCpp.h>
#include <gmock/gmock.h>
#include <sqlite3.h>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/store/testing/opened_store.h"
#include "proto/timestamps.h"

namespace ringleader::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

v1::Measurements Measured(const std::string& device, const std::string& driver, double ms) {
  v1::Measurements measured;
  v1::LatencyTable* const layers = measured.mutable_layers();
  layers->mutable_machine()->set_device(device);
  layers->mutable_machine()->set_driver(driver);
  layers->mutable_shape()->set_pattern("dense");
  layers->add_rows()->set_p50_ms(ms);
  v1::LinkSpeed* const link = measured.add_links();
  *link->mutable_machine() = layers->machine();
  link->set_bytes_per_second(1e9 * ms);
  return measured;
}

class MeasurementsTest : public testing::OpenedStoreTest {
 protected:
  void Put(const v1::Measurements& measured) {
    clock_.Advance(absl::Seconds(1));
    Write([&](WriteTransaction& t) { return t.PutMeasurements(measured); });
  }
  MeasurementList All() {
    const auto list = Read([](ReadTransaction& t) { return t.ListMeasurements(); });
    EXPECT_TRUE(list.ok()) << list.status();
    return list.value_or(MeasurementList());
  }
  std::vector<double> Times() {
    std::vector<double> times;
    for (const v1::LatencyTable& table : All().tables) times.push_back(table.rows(0).p50_ms());
    return times;
  }
};

TEST_F(MeasurementsTest, TheNewestOfAKindReplacesTheOneBefore) {
  Put(Measured("H200", "580", 10));
  Put(Measured("H100", "580", 20));
  Put(Measured("H200", "590", 30));
  Put(Measured("H200", "580", 40));
  Reopen();
  EXPECT_THAT(Times(), ElementsAre(40, 30, 20));
  EXPECT_THAT(All().links, SizeIs(3));
  EXPECT_EQ(All().links[0].bytes_per_second(), 4e10);
  v1::Measurements between = Measured("H200", "580", 50);
  between.clear_layers();
  between.mutable_links(0)->set_between_nodes(true);
  Put(between);
  EXPECT_THAT(All().links, SizeIs(4));
  EXPECT_THAT(Times(), ElementsAre(40, 30, 20));
}

TEST_F(MeasurementsTest, OfAnyOtherMachineOrShapeAreApart) {
  Put(Measured("H200", "580", 1));
  int others = 0;
  for (const auto change : std::vector<void (*)(v1::LatencyTable*)>{
           [](v1::LatencyTable* table) { table->mutable_machine()->set_device("H100"); },
           [](v1::LatencyTable* table) { table->mutable_machine()->set_clocks("SM"); },
           [](v1::LatencyTable* table) { table->mutable_machine()->set_driver("590"); },
           [](v1::LatencyTable* table) { table->mutable_machine()->set_build("2"); },
           [](v1::LatencyTable* table) { table->mutable_shape()->set_pattern("other"); },
           [](v1::LatencyTable* table) { table->mutable_shape()->set_tile(64); },
           [](v1::LatencyTable* table) { table->mutable_shape()->set_heads(32); },
           [](v1::LatencyTable* table) { table->mutable_shape()->set_kv_heads(8); },
           [](v1::LatencyTable* table) { table->mutable_shape()->set_head_dim(128); }}) {
    v1::Measurements measured = Measured("H200", "580", 2);
    change(measured.mutable_layers());
    Put(measured);
    ++others;
    EXPECT_THAT(All().tables, SizeIs(1 + others));
  }
}

TEST_F(MeasurementsTest, HaveTheTimeAtWhichTheyCame) {
  v1::Measurements measured = Measured("H200", "580", 10);
  measured.mutable_layers()->mutable_time()->set_seconds(1);  // by some trainer's clock
  Put(measured);
  const MeasurementList list = All();
  ASSERT_THAT(list.tables, SizeIs(1));
  ASSERT_THAT(list.links, SizeIs(1));
  EXPECT_EQ(ToTime(list.tables[0].time()), clock_.Now());
  EXPECT_EQ(ToTime(list.links[0].time()), clock_.Now());
}

// A node that says it is another machine each time pushes out its own device's alone, and a
// thousand devices stay a bounded list.
TEST_F(MeasurementsTest, AreBoundedByDeviceAndInAll) {
  Put(Measured("H200", "580", 1));
  for (int i = 0; i < 20; ++i) Put(Measured("H100", absl::StrCat(i), 100 + i));
  EXPECT_THAT(Times(), ElementsAre(119, 118, 117, 116, 115, 114, 113, 112, 1));
  for (int i = 0; i < 200; ++i) Put(Measured(absl::StrCat("device ", i), "", 1000 + i));
  EXPECT_EQ(All().tables.size() + All().links.size(), 128u);
  EXPECT_EQ(Times().front(), 1199);
}

// Whatever the coordinator's clock said when it started, what comes later is newer.
TEST_F(MeasurementsTest, AClockThatWasAheadMakesNothingOldWhatComesAfterIt) {
  const auto start_with_clock = [&](absl::Duration ahead) {
    store_.reset();
    clock_.Advance(ahead);
    Reopen();
  };
  start_with_clock(absl::Hours(24 * 365));
  for (int i = 0; i < 8; ++i) Put(Measured("H200", absl::StrCat(i), 100 + i));
  for (int i = 0; i < 120; ++i) Put(Measured(absl::StrCat("device ", i), "", 1000 + i));
  start_with_clock(-absl::Hours(24 * 365));
  Put(Measured("H200", "new", 1));
  EXPECT_EQ(Times().front(), 1);
  EXPECT_EQ(ToTime(All().tables[0].time()), clock_.Now());
  Put(Measured("H200", "newer", 2));
  const std::vector<double> times = Times();
  EXPECT_THAT(std::vector<double>(times.begin(), times.begin() + 2), ElementsAre(2, 1));
}

TEST_F(MeasurementsTest, ADamagedTableIsNamedAndMeasuredAnew) {
  Put(Measured("H200", "580", 10));
  Put(Measured("H100", "580", 20));
  store_.reset();
  {
    SQLite::Database database(dir_.File("coordinator.db"), SQLite::OPEN_READWRITE);
    ASSERT_EQ(database.exec("UPDATE measurements SET data = X'00112233445566778899' WHERE device = "
                            "'H200' AND subject LIKE 'dense%'"),
              1);
  }
  Reopen();
  const MeasurementList list = All();
  EXPECT_THAT(Times(), ElementsAre(20));
  EXPECT_THAT(list.links, SizeIs(2));
  ASSERT_THAT(list.damaged, SizeIs(1));
  EXPECT_EQ(list.damaged[0].code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(list.damaged[0].message()),
              HasSubstr("what was measured of H200 (dense"));
  Put(Measured("H200", "580", 30));
  EXPECT_THAT(Times(), ElementsAre(30, 20));
  EXPECT_TRUE(All().damaged.empty());
}

TEST_F(MeasurementsTest, AJobsPlanIsKeptUntilTheNextAndGoesWithIt) {
  v1::StepPlan plan;
  plan.set_version(1);
  EXPECT_EQ(Refusal([&](WriteTransaction& t) { return t.PutPlan("a", plan); }),
            absl::StatusCode::kNotFound);
  Create("a");
  const auto stored = [&] { return *Read([](ReadTransaction& t) { return t.GetPlan("a"); }); };
  EXPECT_EQ(stored(), std::nullopt);
  for (const uint64_t version : {1, 2}) {
    plan.set_version(version);
    Write([&](WriteTransaction& t) { return t.PutPlan("a", plan); });
    Reopen();
    EXPECT_EQ(stored()->version(), version);
  }
  Write([](WriteTransaction& t) { return t.DeleteJob("a"); });
  Create("a");
  EXPECT_EQ(stored(), std::nullopt);
}

}  // namespace
}  // namespace ringleader::store
