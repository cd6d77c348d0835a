// Stacks, and switching between them: written out for x86-64, ucontext elsewhere or with TW_EMULATOR_UCONTEXT.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#if defined(__x86_64__) && !defined(TW_EMULATOR_UCONTEXT)

struct Context {
  void* stack_pointer = nullptr;
};

extern "C" void tw_emulator_switch(void** save, void* load);
asm(R"(
.text
.type tw_emulator_switch, @function
tw_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tw_emulator_switch, . - tw_emulator_switch
)");

inline void switch_context(Context& from, Context& to) { tw_emulator_switch(&from.stack_pointer, to.stack_pointer); }

// The first switch to `context` calls `entry`, which must not return.
inline void prepare_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(15));
  *--top = nullptr;  // keeps the stack as a call would leave it: entry's frame begins 8 bytes off a multiple of 16
  *--top = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context.stack_pointer = top;
}

#else

#include <ucontext.h>

struct Context {
  ucontext_t registers;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }

inline void prepare_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack;
  context.registers.uc_stack.ss_size = bytes;
  makecontext(&context.registers, entry, 0);
}

#endif

// Stacks of a fixed size, kept for the next thread. A word at the low end tells whether one ran over.
class Stacks {
 public:
  static constexpr size_t BYTES = 32 * 1024;

  char* take() {
    if (free_.empty()) map();
    char* stack = free_.back();
    free_.pop_back();
    *reinterpret_cast<uint64_t*>(stack) = CANARY;
    return stack;
  }
  void give(char* stack) { free_.push_back(stack); }
  static bool overflowed(const char* stack) { return *reinterpret_cast<const uint64_t*>(stack) != CANARY; }

 private:
  static constexpr uint64_t CANARY = 0x5afe57acc0ffee11;
  static constexpr size_t STRIDE = BYTES + 5 * 64;  // equal depths fall into different cache sets
  static constexpr size_t AT_ONCE = 512;

  void map() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* block = mmap(nullptr, STRIDE * AT_ONCE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (block == MAP_FAILED) throw std::bad_alloc();
    for (size_t i = AT_ONCE; i-- > 0;) free_.push_back(static_cast<char*>(block) + i * STRIDE);
  }
  std::vector<char*> free_;
};
