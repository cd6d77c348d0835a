// Takes SMs for a time. A stand-in for a kernel with the same CTAs, so that kernels beside it can be timed.

struct HoldParams {
  unsigned long long nanoseconds;
};

unsigned long long now() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

extern "C" __global__ void hold_sms(const __grid_constant__ HoldParams params) {
  unsigned long long begin = now();
  while (now() - begin < params.nanoseconds) {
    asm volatile("nanosleep.u32 200;");
  }
}
