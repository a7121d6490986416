// ringleader-trainer: one rank of one attempt. Its worker starts it; it lives as long as the
// attempt.
#include "base/process/signals.h"
#include "base/standard_streams.h"
#include "worker/trainer/steps/run.h"
#include "worker/trainer/trainer_main.h"

int main(int argc, char** argv) {
  ringleader::TakeStandardStreams();
  ringleader::FailTooLargeWrites();
  return ringleader::trainer::RunProcess(argc, argv, &ringleader::trainer::Run);
}
