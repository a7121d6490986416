// GPUs through NVML, with a library of the tests in the driver's place.
#include "worker/agent/gpu/gpu_monitor.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <time.h>

#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "worker/agent/gpu/gpu_metrics.h"
#include "worker/agent/gpu/testing/fake_driver.h"
#include "worker/agent/node/inventory.h"

namespace ringleader::agent {
namespace {

using ::testing::ElementsAre;
using testing::FakeDriver;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;

constexpr absl::Duration kPatience = absl::Seconds(20);

GpuMonitorOptions With(const char* library) {
  return {.library = library, .interval = absl::Milliseconds(20)};
}

bool Eventually(const std::function<bool()>& condition) {
  const absl::Time deadline = absl::Now() + kPatience;
  while (!condition()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

std::string PageOf(const GpuMonitor& monitor) {
  std::ostringstream page;
  prometheus::TextSerializer().Serialize(page, GpuMetrics(&monitor).Collect());
  return page.str();
}

TEST(NvmlTest, AMachineWithoutADriverHasNoGpus) {
  EXPECT_TRUE(absl::IsNotFound(Nvml::Open("libnvidia-ml-that-is-not-there.so.1").status()));
  const GpuMonitor monitor(With("libnvidia-ml-that-is-not-there.so.1"));
  const absl::Time start = absl::Now();
  EXPECT_THAT(monitor.List(kPatience), IsEmpty());
  EXPECT_LT(absl::Now() - start, kPatience) << "there is nothing to wait for";
  EXPECT_THAT(monitor.Faults(), IsEmpty());
  EXPECT_EQ(PageOf(monitor), "");
}

TEST(NvmlTest, NamesTheFunctionThatIsMissingOrFails) {
  FakeDriver driver("gpus 2");
  const absl::Status missing = Nvml::Open(FAKE_NVML_WITHOUT_REQUIRED).status();
  EXPECT_TRUE(absl::IsUnavailable(missing)) << missing;
  EXPECT_THAT(std::string(missing.message()), HasSubstr("has no nvmlDeviceGetCount_v2"));
  EXPECT_THAT(GpuMonitor(With(FAKE_NVML_WITHOUT_REQUIRED)).List(kPatience), IsEmpty());

  for (const char* function :
       {"nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"}) {
    driver.Say(absl::StrCat("gpus 2\nfail ", function, " 3"));
    const absl::Status failed = Nvml::Open(FAKE_NVML).status();
    EXPECT_TRUE(absl::IsUnavailable(failed)) << failed;
    EXPECT_EQ(failed.message(), absl::StrCat(function, ": Not Supported"));
  }
}

// As NVIDIA's nvml.h has them. The library of these tests is built with the same names as the
// worker: it would agree with any other numbers.
TEST(NvmlTest, NumbersAreTheDrivers) {
  EXPECT_EQ(nvml::kSuccess, 0);
  EXPECT_EQ(nvml::kNotSupported, 3);
  EXPECT_EQ(nvml::kTimeout, 10);
  EXPECT_EQ(nvml::kGpuIsLost, 15);
  EXPECT_EQ(nvml::kSmClock, 1);
  EXPECT_EQ(nvml::kMemoryClock, 2);
  EXPECT_EQ(nvml::kGpuDie, 0);
  EXPECT_EQ(nvml::kCorrected, 0);
  EXPECT_EQ(nvml::kUncorrected, 1);
  EXPECT_EQ(nvml::kSinceDriverLoad, 0);
  EXPECT_EQ(nvml::kPowerCap, 0x4u);
  EXPECT_EQ(nvml::kHardwareSlowdown, 0x8u);
  EXPECT_EQ(nvml::kSoftwareThermal, 0x20u);
  EXPECT_EQ(nvml::kHardwareThermal, 0x40u);
  EXPECT_EQ(nvml::kPowerBrake, 0x80u);
  EXPECT_EQ(nvml::kXidEvents, 0x8u);
  EXPECT_EQ(sizeof(nvml::Memory), 24u);
  EXPECT_EQ(sizeof(nvml::EventData), 32u);
}

TEST(NvmlTest, GivesBackWhatItTookOfTheDriver) {
  FakeDriver driver("gpus 2");
  void* const library = dlopen(FAKE_NVML, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  const absl::Cleanup close = [library] { dlclose(library); };
  const auto in_use = reinterpret_cast<int (*)()>(dlsym(library, "FakeNvmlInUse"));
  ASSERT_NE(in_use, nullptr);
  const auto none = [&] { return in_use() == 0; };
  ASSERT_TRUE(Eventually(none));
  EXPECT_EQ(Nvml::Open(FAKE_NVML).status(), absl::OkStatus());
  EXPECT_EQ(in_use(), 0);
  driver.Say("gpus 2\nfail nvmlDeviceGetUUID 3");
  EXPECT_FALSE(Nvml::Open(FAKE_NVML).ok());
  EXPECT_EQ(in_use(), 0);
  driver.Say("gpus 2");
  EXPECT_EQ(GpuMonitor(With(FAKE_NVML)).List(kPatience).size(), 2u);
  EXPECT_TRUE(Eventually(none));
  // A set of events of no GPU is of no use to anybody.
  driver.Say("gpus 2\nfail nvmlDeviceRegisterEvents 3");
  const auto deaf = Nvml::Open(FAKE_NVML);
  ASSERT_TRUE(deaf.ok()) << deaf.status();
  EXPECT_EQ(in_use(), 10);
}

TEST(GpuMonitorTest, ListsAndSamplesGpus) {
  FakeDriver driver("gpus 2");
  const GpuMonitor monitor(With(FAKE_NVML));
  const std::vector<v1::Gpu> gpus = monitor.List(kPatience);
  ASSERT_EQ(gpus.size(), 2u);
  EXPECT_EQ(gpus[1].uuid(), "GPU-fake-1");
  EXPECT_EQ(gpus[1].model(), "NVIDIA Fake");
  EXPECT_EQ(gpus[1].memory_bytes(), uint64_t{80} << 30);
  const std::string page = PageOf(monitor);
  const std::string gpu = R"({gpu="1",uuid="GPU-fake-1")";
  for (const std::string& line :
       {absl::StrCat("healthy", gpu, "} 1"), absl::StrCat("utilization_ratio", gpu, "} 0.97"),
        absl::StrCat("memory_used_bytes", gpu, "} 21474836480"),
        absl::StrCat("memory_total_bytes", gpu, "} 85899345920"),
        absl::StrCat("power_watts", gpu, "} 652.4"),
        absl::StrCat("temperature_celsius", gpu, "} 61"),
        absl::StrCat("clock_hertz", gpu, R"(,clock="sm"} 1755000000)"),
        absl::StrCat("clock_hertz", gpu, R"(,clock="memory"} 3201000000)"),
        absl::StrCat("throttled", gpu, R"(,reason="power_cap"} 1)"),
        absl::StrCat("throttled", gpu, R"(,reason="hardware_thermal"} 0)"),
        absl::StrCat("ecc_errors_total", gpu, R"(,kind="corrected"} 3)"),
        absl::StrCat("ecc_errors_total", gpu, R"(,kind="uncorrected"} 0)")}) {
    EXPECT_THAT(page, HasSubstr("ringleader_worker_gpu_" + line + "\n"));
  }
  EXPECT_THAT(page, HasSubstr("# TYPE ringleader_worker_gpu_ecc_errors_total counter"));
  EXPECT_THAT(page, HasSubstr("ringleader_worker_gpu_sample_age_seconds "));
}

TEST(GpuMonitorTest, WhatHoldsTheClocksDownIsNamed) {
  FakeDriver driver("gpus 1");
  // The lines of what holds them down while the driver gives these bits.
  const auto holding = [&](uint64_t bits) {
    driver.Say(absl::StrCat("gpus 1\nthrottle ", bits));
    const GpuMonitor monitor(With(FAKE_NVML));
    EXPECT_EQ(monitor.List(kPatience).size(), 1u);
    std::vector<std::string> lines;
    for (const absl::string_view line : absl::StrSplit(PageOf(monitor), '\n')) {
      if (absl::StrContains(line, "gpu_throttled{") && absl::EndsWith(line, " 1")) {
        lines.emplace_back(line);
      }
    }
    return lines;
  };
  for (const auto& [bit, reason] :
       std::map<nvml::Throttle, std::string>{{nvml::kPowerCap, "power_cap"},
                                             {nvml::kHardwareSlowdown, "hardware_slowdown"},
                                             {nvml::kSoftwareThermal, "software_thermal"},
                                             {nvml::kHardwareThermal, "hardware_thermal"},
                                             {nvml::kPowerBrake, "power_brake"}}) {
    EXPECT_THAT(holding(bit), ElementsAre(HasSubstr(absl::StrCat("reason=\"", reason, "\""))));
  }
  EXPECT_THAT(holding(nvml::kPowerCap | nvml::kHardwareThermal),
              ElementsAre(HasSubstr("power_cap"), HasSubstr("hardware_thermal")));
}

TEST(GpuMonitorTest, WhatADriverDoesNotTellIsAbsent) {
  FakeDriver driver("gpus 1\nfail nvmlDeviceGetPowerUsage 3");
  const GpuMonitor monitor(With(FAKE_NVML_WITHOUT_OPTIONAL));
  ASSERT_EQ(monitor.List(kPatience).size(), 1u);
  const std::string page = PageOf(monitor);
  EXPECT_THAT(page, HasSubstr("gpu_utilization_ratio{"));
  for (const char* absent : {"gpu_power_watts{", "gpu_throttled{", "gpu_ecc_errors_total{"}) {
    EXPECT_THAT(page, Not(HasSubstr(absent)));
  }
  EXPECT_THAT(monitor.Faults(), IsEmpty());
  // What it does tell is looked at again and again.
  driver.Say("gpus 1\nlost 0 1");
  EXPECT_TRUE(Eventually([&] { return !monitor.Faults().empty(); }));
}

TEST(GpuMonitorTest, UncorrectableErrorsAreFaultsUntilTheGpuIsReset) {
  FakeDriver driver("gpus 2\nuncorrected 1 5");
  const GpuMonitor monitor(With(FAKE_NVML));
  // Known with the list: a worker that starts never offers such a GPU.
  ASSERT_EQ(monitor.List(kPatience).size(), 2u);
  EXPECT_THAT(
      monitor.Faults(),
      ElementsAre(Pair("GPU-fake-1", "5 uncorrectable memory errors since the driver was loaded")));
  EXPECT_THAT(PageOf(monitor), HasSubstr(R"(gpu_healthy{gpu="1",uuid="GPU-fake-1"} 0)"));
  EXPECT_THAT(PageOf(monitor), HasSubstr(R"(gpu_healthy{gpu="0",uuid="GPU-fake-0"} 1)"));
  driver.Say("gpus 2");
  EXPECT_TRUE(Eventually([&] { return monitor.Faults().empty(); }));
}

// Else a GPU whose row was replaced would be of no use for ever.
TEST(GpuMonitorTest, ErrorsOfBeforeTheDriverWasLoadedAreNoFault) {
  FakeDriver driver("gpus 1\nuncorrected_ever 0 9");
  const GpuMonitor monitor(With(FAKE_NVML));
  ASSERT_EQ(monitor.List(kPatience).size(), 1u);
  EXPECT_THAT(monitor.Faults(), IsEmpty());
  EXPECT_THAT(PageOf(monitor), HasSubstr(R"(kind="uncorrected"} 0)"));
}

// It shares the machine with trainers that want all cores.
TEST(GpuMonitorTest, TakesNoTimeOfTheCoresWhereTheDriverTellsOfNoXids) {
  FakeDriver driver("gpus 1");
  const GpuMonitor monitor({.library = FAKE_NVML_WITHOUT_OPTIONAL, .interval = absl::Minutes(10)});
  ASSERT_EQ(monitor.List(kPatience).size(), 1u);
  const auto used = [] {
    timespec time = {};
    EXPECT_EQ(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time), 0);
    return absl::DurationFromTimespec(time);
  };
  const absl::Duration before = used();
  absl::SleepFor(absl::Milliseconds(500));
  EXPECT_LT(used() - before, absl::Milliseconds(50));
}

TEST(GpuMonitorTest, EveryKindOfFaultIsNamed) {
  FakeDriver driver("gpus 2");
  const GpuMonitor monitor(With(FAKE_NVML));
  monitor.List(kPatience);
  driver.Say("gpus 2\nlost 0 1\nremap_failed 1 1");
  EXPECT_TRUE(Eventually([&] { return monitor.Faults().size() == 2; }));
  EXPECT_THAT(monitor.Faults(),
              ElementsAre(Pair("GPU-fake-0", HasSubstr("fallen off the bus")),
                          Pair("GPU-fake-1", "a faulty memory row could not be replaced")));
}

TEST(GpuMonitorTest, AGpuThatWasLostBeforeIsNotOffered) {
  FakeDriver driver("gpus 2\nlost 0 1");
  const std::vector<v1::Gpu> gpus = GpuMonitor(With(FAKE_NVML)).List(kPatience);
  ASSERT_EQ(gpus.size(), 1u);
  EXPECT_EQ(gpus[0].uuid(), "GPU-fake-1");
}

TEST(GpuMonitorTest, AnXidOfTheHardwareIsAFaultAndOneOfAProgramIsNot) {
  FakeDriver driver("gpus 2\nxid 1 79");
  {
    const GpuMonitor monitor(With(FAKE_NVML));
    EXPECT_TRUE(Eventually([&] { return !monitor.Faults().empty(); }));
    EXPECT_THAT(monitor.Faults(),
                ElementsAre(Pair("GPU-fake-1", "XID 79: the GPU has fallen off the bus")));
    EXPECT_THAT(PageOf(monitor),
                AllOf(HasSubstr(R"(gpu_xid_errors_total{gpu="1",uuid="GPU-fake-1",xid="79"} 1)"),
                      HasSubstr("gpu_xid_errors_total counter\n"),
                      HasSubstr("gpu_ecc_errors_total counter\n")));
  }
  driver.Say("gpus 2\nxid 0 13");
  const GpuMonitor monitor(With(FAKE_NVML));
  EXPECT_TRUE(Eventually([&] { return PageOf(monitor).find("xid=\"13\"") != std::string::npos; }));
  EXPECT_THAT(monitor.Faults(), IsEmpty());
}

TEST(GpuMonitorTest, XidsAreCountedAndOnesThatAreNoneAreNot) {
  FakeDriver driver("gpus 2\nxid 1 79\nxid_times 3");
  {
    const GpuMonitor monitor(With(FAKE_NVML));
    EXPECT_TRUE(Eventually([&] {
      return PageOf(monitor).find(R"(uuid="GPU-fake-1",xid="79"} 3)") != std::string::npos;
    })) << PageOf(monitor);
  }
  // Another kind of event has data of its own.
  driver.Say("gpus 2\nxid 1 79\nevent_type 16");
  const absl::StatusOr<std::unique_ptr<Nvml>> nvml = Nvml::Open(FAKE_NVML);
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  const auto event = (*nvml)->AwaitXid(kPatience);
  ASSERT_TRUE(event.ok()) << event.status();
  EXPECT_FALSE(event->has_value());
}

// A node may have GPUs of two kinds.
TEST(GpuMonitorTest, AGpuOfWhichTheDriverTellsNothingSilencesNoOther) {
  FakeDriver driver("gpus 2\ndeaf 0 1\nxid 1 79");
  const GpuMonitor monitor(With(FAKE_NVML));
  EXPECT_TRUE(Eventually([&] { return monitor.Faults().contains("GPU-fake-1"); }));
}

TEST(FaultOfTest, TheFirstUncorrectableErrorIsAFault) {
  GpuSample sample;
  sample.corrected_errors = 9;
  sample.uncorrected_errors = 0;
  EXPECT_EQ(FaultOf({.gpu = {}, .sample = sample, .xids = {}}), "");
  sample.uncorrected_errors = 1;
  EXPECT_THAT(FaultOf({.gpu = {}, .sample = sample, .xids = {}}),
              HasSubstr("1 uncorrectable memory errors"));
}

TEST(FaultOfTest, XidsOfTheHardwareAreFaultsAndNamed) {
  const auto fault_after = [](uint64_t xid) {
    return FaultOf({.gpu = {}, .sample = {}, .xids = {{xid, 1}}});
  };
  EXPECT_EQ(fault_after(48), "XID 48: uncorrectable memory error");
  EXPECT_EQ(fault_after(64), "XID 64: a faulty memory row could not be replaced");
  EXPECT_EQ(fault_after(79), "XID 79: the GPU has fallen off the bus");
  EXPECT_EQ(fault_after(94), "XID 94: uncorrectable memory error, contained");
  EXPECT_EQ(fault_after(95), "XID 95: uncorrectable memory error, not contained");
  EXPECT_EQ(fault_after(140), "XID 140: uncorrectable memory error");
  // A program's exception or fault, its end, a row that was replaced, a GPU that is too busy.
  for (const uint64_t xid : {13, 31, 43, 45, 63, 65, 92}) EXPECT_EQ(fault_after(xid), "") << xid;
}

// Whoever asks is answered at once with what was seen last; and the monitor can go.
TEST(GpuMonitorTest, ADriverThatHangsHoldsNobodyUp) {
  FakeDriver driver("gpus 1");
  auto monitor = std::make_unique<GpuMonitor>(With(FAKE_NVML));
  ASSERT_EQ(monitor->List(kPatience).size(), 1u);
  driver.Say("gpus 1\nhang nvmlDeviceGetPowerUsage 1");
  ASSERT_TRUE(Eventually([&] { return monitor->SampleAge() > absl::Milliseconds(500); }));
  const std::string page = PageOf(*monitor), age = "\nringleader_worker_gpu_sample_age_seconds ";
  EXPECT_THAT(page, HasSubstr("gpu_power_watts{"));
  ASSERT_THAT(page, HasSubstr(age));
  const double seconds = std::stod(page.substr(page.find(age) + age.size()));
  EXPECT_GT(seconds, 0.5);
  EXPECT_LT(seconds, 500) << "it is not in milliseconds";
  EXPECT_THAT(monitor->Faults(), IsEmpty());
  // It answers again, and what is shown is new.
  driver.Say("gpus 1");
  EXPECT_TRUE(Eventually([&] { return monitor->SampleAge() < absl::Milliseconds(400); }));
  driver.Say("gpus 1\nhang nvmlDeviceGetPowerUsage 1");
  ASSERT_TRUE(Eventually([&] { return monitor->SampleAge() > absl::Milliseconds(500); }));
  monitor.reset();

  // The driver hangs from its first call on: there is no list, and the wait for it ends.
  driver.Say("gpus 1\nhang nvmlInit_v2 1");
  GpuMonitor stuck(With(FAKE_NVML));
  EXPECT_THAT(stuck.List(absl::Milliseconds(10)), IsEmpty());
  driver.Say("gpus 1");
  EXPECT_EQ(stuck.List(kPatience).size(), 1u);
}

TEST(WithFaultsTest, AGpuWithAFaultTakesItsSlotAlong) {
  v1::NodeInventory inventory;
  inventory.set_trainers(2);
  for (const char* uuid : {"a", "b", "c"}) inventory.add_gpus()->set_uuid(uuid);
  const v1::NodeInventory faulty = WithFaults(inventory, {{"b", "why"}, {"elsewhere", "x"}});
  EXPECT_EQ(faulty.trainers(), 1);
  EXPECT_EQ(faulty.gpus(1).fault(), "why");
  EXPECT_EQ(faulty.gpus(0).fault(), "");
  // No slot runs on the third.
  EXPECT_EQ(WithFaults(inventory, {{"c", "why"}}).trainers(), 2);
}

}  // namespace
}  // namespace ringleader::agent
