// The native source of collectives: C++ kernels at the dispatch key BackendSelect that write the
// same slots of the same ring as the Python recorder, without its cost.
//
// Compiled for one minor version of PyTorch and any Python: ready-made by `.ci/build_probes.py`, else
// at first use by `build.py`. Python decides (which operators, which group is which, what a place in
// the code is called); this file only measures.
// Nothing here may throw into the caller's collective: the user's own exceptions pass, ours end
// in the header's count of hook errors. The mapping is never unmapped, so a worker thread of the
// backend may tell an end at any time.

#include "python.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/api/include/torch/version.h>
#include <torch/library.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch::autograd {
TORCH_API int get_current_graph_task_id(); // graph_task.h includes half of torch
}

namespace {

// --- the ring: `rankscope/ring.py` owns the layout and compares it with this text --------------

constexpr char LAYOUT[] =
    "number:Q arrived_ns:Q started_ns:Q returned_ns:Q ended_ns:Q input_bytes:Q output_bytes:Q "
    "blocked_ns:Q sequence:I step:I thread_id:I peer_rank:i call_site:I group_id:H num_tensors:H "
    "operation:B state:B dtype:B flags:B reduce_op:B issued_by:B ended_by:B reserved:B";

struct Slot {
  std::atomic<uint64_t> number;
  uint64_t arrived_ns, started_ns, returned_ns, ended_ns, input_bytes, output_bytes, blocked_ns;
  uint32_t sequence, step, thread_id;
  int32_t peer_rank;
  uint32_t call_site;
  uint16_t group_id, num_tensors;
  uint8_t operation;
  std::atomic<uint8_t> state;
  uint8_t dtype, flags, reduce_op, issued_by, ended_by, reserved;
};
static_assert(sizeof(Slot) == 96);

// Numbers of the wire that Python hands over, in the order of CONSTANTS in source.py.
struct Constants {
  int header_bytes, head_at, heartbeat_at, step_at, hook_errors_at, blocked_at, latest_end_at,
      engine_number_at, engine_arrived_at, engine_site_at, own_ns_at, own_thinned_ns_at, thinned_at,
      training_thread_at;
  int issued, returned, ended, failed;
  int flag_async, flag_p2p, flag_end_from_wait, flag_thinned, flag_by_engine;
  int issued_by, ended_by_future, ended_by_wait, ended_by_error;
  int num_reduce_ops;
};
constexpr int NUM_CONSTANTS = sizeof(Constants) / sizeof(int);

constexpr uint64_t MEASURE_EVERY = 17; // calls between two readings of our own CPU time: a prime
constexpr int MAX_FRAMES = 40;
constexpr size_t MAX_PLACES = 50000;
constexpr size_t THREAD_WORDS_BYTES = 128; // of PyThreadState, in which the recursion is looked for
constexpr size_t PENDING_SLOTS = 8192; // works whose wait is still to come
constexpr size_t PENDING_WAYS = 8;

struct Group {
  Group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int index, std::vector<int> ranks)
      : group(group.get()), weak(group), index(index), ranks(std::move(ranks)) {}

  void forget() { // let the memory of the process group go; the record of it stays
    group.store(nullptr);
    weak.reset();
  }
  std::atomic<c10d::ProcessGroup*> group;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> weak; // while it is held the address is not reused
  const int index;
  const std::vector<int> ranks;
  std::atomic<uint32_t> sequence{0};
  std::mutex p2p_mutex;
  std::unordered_map<int64_t, uint32_t> p2p; // (operation, peer) -> how many
};

struct Row { // one operator: where its parts stand, and what it is called on the wire
  int operation, group_at, peer_at, async_at, reduce_at, num_arguments;
  bool is_p2p, is_barrier, has_future, root_hands_in, root_receives;
  mutable std::atomic<bool> without_future{false};
};

struct Token {
  int64_t number = -1; // -1: not recorded
  bool by_engine = false; // the autograd engine called: C++ waits, not Python
  bool on_host = false; // the end can be seen from the CPU
  bool thinned = false; // of a thinned step: its end is seen where Python waits for it, only
};

struct Measured {
  uint64_t bytes = 0;
  int count = 0;
  int dtype = 0;
  bool on_host = true;
  const void* storage = nullptr; // of the first tensor: what wait_tensor is called with
};

struct PlaceKey {
  PyCodeObject* code;
  int instruction;
  bool operator==(const PlaceKey& other) const {
    return code == other.code && instruction == other.instruction;
  }
};
struct PlaceHash {
  size_t operator()(const PlaceKey& key) const {
    return std::hash<void*>()(key.code) * 31 + key.instruction;
  }
};

struct Pending {
  std::atomic<const void*> key{nullptr};
  std::atomic<int64_t> number{-1}; // bit 62: the end can be seen from the CPU
};
constexpr int64_t ON_HOST_BIT = int64_t(1) << 62;

// --- state of the process: made once, never freed ----------------------------------------------

struct Probe {
  char* ring = nullptr;
  uint64_t num_slots = 0;
  Constants is{};
  int rank = -1;
  std::atomic<bool> active{false};
  std::atomic<bool> call_sites{true};
  std::vector<int> dtype_of; // torch's ScalarType -> the wire's number
  std::mutex groups_mutex;
  std::unordered_map<c10d::ProcessGroup*, Group*> groups;
  std::unordered_map<int, Group*> groups_by_index; // for ever: sequences go on
  // guarded by the interpreter lock:
  std::unordered_map<PyCodeObject*, bool> inside_torch;
  std::unordered_map<PlaceKey, int, PlaceHash> places;
  PyObject* define_group = nullptr; // (name) -> (index, ranks) or None
  PyObject* is_inside = nullptr; // (code) -> bool
  PyObject* name_place = nullptr; // (code, line) -> index
  PyObject* engine_code = nullptr;
  PyTypeObject* work_type = nullptr;
  int recursion_at = -1; // offset in PyThreadState of the int32 that each call counts down, -1 unknown
  std::unique_ptr<torch::Library> c10d_library, functional_library;
  Pending pending[PENDING_SLOTS];
  std::atomic<int64_t> ends_expected{0}; // futures that have not called back yet
};
Probe* probe = nullptr;

thread_local Group* latest_group = nullptr;
thread_local uint32_t own_thread_id = 0;
thread_local int engine_depth = -1; // recursion left where the engine called, -1 unknown
thread_local uint64_t engine_pass = 0; // the backward pass for which that is known

uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return uint64_t(time.tv_sec) * 1000000000u + uint64_t(time.tv_nsec);
}

uint64_t thread_cpu_ns() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return uint64_t(time.tv_sec) * 1000000000u + uint64_t(time.tv_nsec);
}

uint32_t thread_id() {
  if (own_thread_id == 0) own_thread_id = uint32_t(syscall(SYS_gettid));
  return own_thread_id;
}

std::atomic<uint64_t>& header(int at) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(probe->ring + at);
}

bool is_thinned() { return probe->ring[probe->is.thinned_at] != 0; }

Slot& slot_of(int64_t number) {
  return *reinterpret_cast<Slot*>(
      probe->ring + probe->is.header_bytes + (uint64_t(number) % probe->num_slots) * sizeof(Slot));
}

bool is_still(const Slot& slot, int64_t number) {
  return slot.number.load(std::memory_order_acquire) == uint64_t(number) + 1;
}

void finish(int64_t number, int state, int flags, int by) noexcept {
  if (!probe->active.load(std::memory_order_relaxed)) return;
  Slot& slot = slot_of(number);
  if (!is_still(slot, number)) return;
  uint8_t before = slot.state.load(std::memory_order_relaxed);
  if (before >= probe->is.ended) return; // only the first end counts
  uint64_t now = now_ns();
  slot.ended_ns = now;
  slot.flags |= uint8_t(flags);
  slot.ended_by = uint8_t(by);
  slot.state.store(uint8_t(state), std::memory_order_release);
  header(probe->is.latest_end_at).store(now, std::memory_order_relaxed);
}

void add_blocked(int64_t number, uint64_t duration_ns) noexcept {
  if (number >= 0) {
    Slot& slot = slot_of(number);
    if (is_still(slot, number)) slot.blocked_ns += duration_ns;
  }
  // the step's time is the training thread's; which one that is the step clock says
  if (header(probe->is.training_thread_at).load(std::memory_order_relaxed) == thread_id())
    header(probe->is.blocked_at).fetch_add(duration_ns, std::memory_order_relaxed);
}

// --- works whose wait is still to come: by address, of the Work and of its first tensor ----------

Pending* bucket_of(const void* key) {
  size_t hash = (reinterpret_cast<uintptr_t>(key) >> 4) * 0x9E3779B97F4A7C15ull;
  return probe->pending + (hash >> 32) % (PENDING_SLOTS / PENDING_WAYS) * PENDING_WAYS;
}

void expect_wait(const void* key, int64_t number, bool on_host) noexcept {
  if (key == nullptr) return;
  Pending* bucket = bucket_of(key);
  Pending* chosen = bucket;
  for (size_t way = 0; way < PENDING_WAYS; ++way) {
    const void* other = bucket[way].key.load(std::memory_order_relaxed);
    if (other == key || other == nullptr) {
      chosen = bucket + way;
      break;
    }
    if ((bucket[way].number.load(std::memory_order_relaxed) & ~ON_HOST_BIT) <
        (chosen->number.load(std::memory_order_relaxed) & ~ON_HOST_BIT))
      chosen = bucket + way; // the oldest makes room: nobody waits for it any more
  }
  chosen->number.store(number | (on_host ? ON_HOST_BIT : 0), std::memory_order_relaxed);
  chosen->key.store(key, std::memory_order_release);
}

Token take_wait(const void* key) noexcept {
  Token token;
  Pending* bucket = bucket_of(key);
  for (size_t way = 0; way < PENDING_WAYS; ++way) {
    if (bucket[way].key.load(std::memory_order_acquire) != key) continue;
    int64_t number = bucket[way].number.load(std::memory_order_relaxed);
    bucket[way].key.store(nullptr, std::memory_order_release);
    token.number = number & ~ON_HOST_BIT;
    token.on_host = (number & ON_HOST_BIT) != 0;
    break;
  }
  return token;
}

void waited(const Token& token, uint64_t began_ns, bool failed) noexcept {
  if (token.number >= 0) {
    if (failed)
      finish(token.number, probe->is.failed, 0, probe->is.ended_by_error);
    else if (token.on_host) // on a device, wait returns when the stream is told to wait
      finish(token.number, probe->is.ended, probe->is.flag_end_from_wait, probe->is.ended_by_wait);
  }
  add_blocked(token.number, now_ns() - began_ns);
}

// --- what Python knows -------------------------------------------------------------------------

class WithInterpreter {
 public:
  WithInterpreter() : state_(PyGILState_Ensure()) { PyErr_Fetch(&type_, &value_, &trace_); }
  ~WithInterpreter() {
    PyErr_Restore(type_, value_, trace_); // an error of the caller's stays the caller's
    PyGILState_Release(state_);
  }

 private:
  PyGILState_STATE state_;
  PyObject *type_, *value_, *trace_;
};

int recursion_left(PyThreadState* thread) { // -1 where it is not known where that stands
  if (probe->recursion_at < 0) return -1;
  int32_t left;
  std::memcpy(&left, reinterpret_cast<const char*>(thread) + probe->recursion_at, sizeof left);
  return left;
}

PyObject* object(PyCodeObject* code) { return reinterpret_cast<PyObject*>(code); }
PyObject* object(PyFrameObject* frame) { return reinterpret_cast<PyObject*>(frame); }

void release(PyObject* reference) {
  if (reference != nullptr) Py_DecRef(reference);
}

Group* define(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (interpreter_ends()) return nullptr;
  int index = -1;
  std::vector<int> ranks;
  {
    WithInterpreter held;
    const std::string name = group->getGroupName();
    PyObject* answer = PyObject_CallFunction(probe->define_group, "s", name.c_str());
    PyObject* list = nullptr;
    if (answer != nullptr && answer != &_Py_NoneStruct &&
        PyArg_ParseTuple(answer, "iO!", &index, &PyList_Type, &list))
      for (Py_ssize_t at = 0; at < PyList_Size(list); ++at)
        ranks.push_back(int(PyLong_AsLong(PyList_GetItem(list, at))));
    release(answer);
    PyErr_Clear();
  }
  if (index < 0) return nullptr;
  std::lock_guard lock(probe->groups_mutex);
  for (auto at = probe->groups.begin(); at != probe->groups.end();)
    if (at->second->weak.expired()) {
      at->second->forget();
      at = probe->groups.erase(at);
    } else {
      ++at;
    }
  auto known = probe->groups.find(group.get());
  if (known != probe->groups.end()) return known->second; // another thread was faster
  Group*& kept = probe->groups_by_index[index];
  if (kept == nullptr) {
    kept = new Group(group, index, std::move(ranks));
  } else { // known before recording was switched off and on
    kept->weak = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group);
    kept->group.store(group.get());
  }
  return probe->groups[group.get()] = kept;
}

Group* group_of(const c10::IValue& argument) {
  auto boxed = argument.toObjectRef().getSlot(0).toCapsule();
  auto* raw = static_cast<c10d::ProcessGroup*>(boxed.get());
  Group* latest = latest_group;
  if (latest != nullptr && latest->group.load(std::memory_order_relaxed) == raw) return latest;
  {
    std::lock_guard lock(probe->groups_mutex);
    auto known = probe->groups.find(raw);
    if (known != probe->groups.end()) return latest_group = known->second;
  }
  Group* defined = define(c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(raw));
  return defined == nullptr ? nullptr : latest_group = defined;
}

bool is_inside_torch(PyCodeObject* code) {
  auto known = probe->inside_torch.find(code);
  if (known != probe->inside_torch.end()) return known->second;
  PyObject* answer = PyObject_CallFunction(probe->is_inside, "O", object(code));
  bool inside = answer == nullptr || PyObject_IsTrue(answer) == 1;
  release(answer);
  PyErr_Clear();
  if (probe->inside_torch.size() < MAX_PLACES) {
    Py_IncRef(object(code)); // its address stays its own
    probe->inside_torch[code] = inside;
  }
  return inside;
}

int place_of(PyFrameObject* frame, PyCodeObject* code) {
  PlaceKey key{code, PyFrame_GetLasti(frame)};
  auto known = probe->places.find(key);
  if (known != probe->places.end()) return known->second;
  if (probe->places.size() >= MAX_PLACES) return 0;
  PyObject* answer = PyObject_CallFunction(
      probe->name_place, "Oi", object(code), PyFrame_GetLineNumber(frame));
  int place = answer == nullptr ? 0 : int(PyLong_AsLong(answer));
  release(answer);
  PyErr_Clear();
  return probe->places[key] = place < 0 ? 0 : place; // inside_torch keeps the code alive
}

// Return the innermost place outside torch; `first_is_engine` tells what the top frame is, and is
// all that is looked for if no place is `wanted`.
int users_place(PyThreadState* thread, bool wanted, bool& first_is_engine) {
  int place = 0;
  PyFrameObject* frame = PyThreadState_GetFrame(thread);
  first_is_engine = frame == nullptr; // a thread of the engine's own
  for (int depth = 0; frame != nullptr && depth < MAX_FRAMES; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (depth == 0) first_is_engine = object(code) == probe->engine_code;
    const bool inside = wanted && is_inside_torch(code);
    if (wanted && !inside) place = place_of(frame, code);
    Py_DecRef(object(code));
    if (!inside) break;
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DecRef(object(frame));
    frame = back;
  }
  release(object(frame));
  return place;
}

// Find the caller's place, and whether the autograd engine called. Within a backward pass the
// interpreter lock is taken once: later calls of the engine are known by the depth of the stack.
int call_site(bool thinned, bool& by_engine) {
  by_engine = false;
  const bool wanted = !thinned && probe->call_sites.load(std::memory_order_relaxed);
  const bool in_engine = torch::autograd::get_current_graph_task_id() >= 0;
  if ((!wanted && !in_engine) || interpreter_ends()) return 0;
  PyThreadState* thread = PyGILState_GetThisThreadState();
  auto& site_of_pass = header(probe->is.engine_site_at);
  uint64_t known = site_of_pass.load(std::memory_order_relaxed);
  if (in_engine && known != 0) {
    if (thread == nullptr || // a thread that never ran Python
        (engine_pass == known && engine_depth >= 0 && engine_depth == recursion_left(thread))) {
      by_engine = true;
      return int(known - 1);
    }
  }
  if (thread == nullptr && in_engine) {
    by_engine = true;
    return 0;
  }
  WithInterpreter held;
  thread = PyThreadState_Get();
  bool first_is_engine = false;
  int place = users_place(thread, !thinned, first_is_engine);
  by_engine = in_engine && first_is_engine;
  if (by_engine) {
    if (known == 0) site_of_pass.store(known = uint64_t(place) + 1, std::memory_order_relaxed);
    engine_depth = recursion_left(thread);
    engine_pass = known;
    return int(known - 1);
  }
  return place;
}

// --- one call ----------------------------------------------------------------------------------

void measure(const c10::IValue& value, Measured& into) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    ++into.count;
    if (!tensor.defined()) return;
    const auto* body = tensor.unsafeGetTensorImpl();
    into.on_host = into.on_host && tensor.is_cpu();
    if (into.dtype == 0) into.dtype = probe->dtype_of[int(tensor.scalar_type())];
    if (body->has_symbolic_sizes_strides() || tensor.layout() != at::kStrided) return;
    into.bytes += uint64_t(body->numel()) * body->itemsize();
    if (into.storage == nullptr && body->has_storage())
      into.storage = body->storage().unsafeGetStorageImpl();
  } else if (value.isList()) {
    for (const c10::IValue& part : value.toListRef()) measure(part, into);
  }
}

int reduce_op_of(const c10::IValue& value) {
  auto boxed = value.toObjectRef().getSlot(0).toCapsule();
  int op = int(static_cast<c10d::ReduceOp*>(boxed.get())->op_);
  return op >= 0 && op < probe->is.num_reduce_ops - 2 ? op + 1 : probe->is.num_reduce_ops - 1;
}

uint32_t next_p2p(Group& group, int operation, int peer) {
  std::lock_guard lock(group.p2p_mutex);
  return ++group.p2p[(int64_t(operation) << 32) | uint32_t(peer)];
}

void fill(Slot& slot, const Row& row, const c10::IValue* arguments, Group& group, Token& token) {
  const Constants& is = probe->is;
  Measured result, handed_in;
  measure(arguments[0], result);
  if (row.group_at == 2) measure(arguments[1], handed_in);
  if (row.is_barrier) { // its tensor is torch's own
    result.bytes = result.count = result.dtype = 0;
    result.storage = nullptr;
  }
  const Measured& input = row.group_at == 2 ? handed_in : result;
  int peer = -1;
  if (row.peer_at >= 0 && arguments[row.peer_at].isInt()) {
    int64_t place = arguments[row.peer_at].toInt();
    if (place >= 0 && place < int64_t(group.ranks.size())) peer = group.ranks[place];
  }
  const bool is_root = !row.is_p2p && peer == probe->rank;
  slot.input_bytes = row.root_hands_in && !is_root ? 0 : input.bytes;
  slot.output_bytes = row.root_receives && !is_root ? 0 : result.bytes;
  bool is_async = row.is_p2p;
  if (row.async_at >= 0 && arguments[row.async_at].isBool())
    is_async = is_async || arguments[row.async_at].toBool();
  slot.sequence = row.is_p2p ? next_p2p(group, row.operation, peer) : ++group.sequence;
  slot.peer_rank = peer;
  slot.group_id = uint16_t(group.index);
  slot.num_tensors = uint16_t(std::min(std::max(result.count, input.count), 65535));
  slot.operation = uint8_t(row.operation);
  slot.dtype = uint8_t(result.dtype != 0 ? result.dtype : input.dtype);
  slot.reduce_op = row.reduce_at >= 0 ? uint8_t(reduce_op_of(arguments[row.reduce_at])) : 0;
  const int place = call_site(token.thinned, token.by_engine);
  slot.call_site = token.thinned ? 0 : uint32_t(place);
  token.on_host = result.on_host && input.on_host;
  slot.flags = uint8_t(
      (row.is_p2p ? is.flag_p2p : 0) | (is_async ? is.flag_async : 0) |
      (token.thinned ? is.flag_thinned : 0) | (token.by_engine ? is.flag_by_engine : 0));
  if (!token.by_engine) expect_wait(result.storage, token.number, token.on_host);
}

void commit(Slot& slot, const Token& token, uint64_t arrived_ns) {
  const Constants& is = probe->is;
  slot.arrived_ns = arrived_ns;
  slot.started_ns = slot.returned_ns = slot.ended_ns = slot.blocked_ns = 0;
  slot.step = uint32_t(header(is.step_at).load(std::memory_order_relaxed));
  slot.thread_id = thread_id();
  slot.issued_by = uint8_t(is.issued_by);
  slot.ended_by = slot.reserved = 0;
  slot.state.store(uint8_t(is.issued), std::memory_order_relaxed);
  slot.number.store(uint64_t(token.number) + 1, std::memory_order_release);
  header(is.heartbeat_at).store(arrived_ns, std::memory_order_relaxed);
  if (token.by_engine) {
    header(is.engine_arrived_at).store(arrived_ns, std::memory_order_relaxed);
    header(is.engine_number_at).store(uint64_t(token.number) + 1, std::memory_order_release);
  }
}

void count_error() noexcept {
  header(probe->is.hook_errors_at).fetch_add(1, std::memory_order_relaxed);
}

Token issued(const Row& row, const c10::IValue* arguments) noexcept {
  Token token;
  try {
    const uint64_t arrived = now_ns();
    Group* group = group_of(arguments[row.group_at]);
    if (group == nullptr) {
      count_error();
      return token;
    }
    token.thinned = is_thinned();
    token.number = int64_t(header(probe->is.head_at).fetch_add(1));
    Slot& slot = slot_of(token.number);
    slot.number.store(0, std::memory_order_release);
    fill(slot, row, arguments, *group, token);
    commit(slot, token, arrived);
  } catch (...) {
    count_error();
    token.number = -1;
  }
  return token;
}

void returned(const Row& row, const Token& token, const c10::IValue& result) noexcept {
  try {
    const Constants& is = probe->is;
    Slot& slot = slot_of(token.number);
    const uint64_t now = now_ns();
    if (is_still(slot, token.number)) {
      slot.returned_ns = now;
      uint8_t before = uint8_t(is.issued);
      slot.state.compare_exchange_strong(before, uint8_t(is.returned));
    }
    header(is.heartbeat_at).store(now, std::memory_order_relaxed);
    if (!result.isObject()) return; // no Work: the call was coalesced into another one
    auto boxed = result.toObjectRef().getSlot(0).toCapsule();
    auto* work = static_cast<c10d::Work*>(boxed.get());
    if (!token.by_engine) expect_wait(work, token.number, token.on_host);
    if (token.thinned) return;
    // the future of device work is complete when it is enqueued: no end
    if (!row.has_future || !token.on_host || row.without_future.load(std::memory_order_relaxed))
      return;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try {
      future = work->getFuture();
    } catch (...) {
      row.without_future = true; // this backend has none for this operation
      return;
    }
    if (!future) return;
    const int64_t number = token.number;
    probe->ends_expected.fetch_add(1);
    future->addCallback([number](c10::ivalue::Future& ended) {
      const Constants& is = probe->is;
      if (ended.hasError())
        finish(number, is.failed, 0, is.ended_by_error);
      else
        finish(number, is.ended, 0, is.ended_by_future);
      probe->ends_expected.fetch_sub(1);
    });
  } catch (...) {
    count_error();
  }
}

const c10::DispatchKeySet AFTER(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

struct Kernel final : c10::OperatorKernel {
  explicit Kernel(const Row* row) : row(row) {}
  const Row* row;

  void operator()(
      const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!probe->active.load(std::memory_order_relaxed))
      return operation.redispatchBoxed(keys & AFTER, stack);
    thread_local uint64_t calls = 0;
    const bool measured = ++calls % MEASURE_EVERY == 0;
    uint64_t own_ns = measured ? thread_cpu_ns() : 0;
    const Token token = issued(*row, stack->data() + stack->size() - row->num_arguments);
    if (measured) own_ns = thread_cpu_ns() - own_ns;
    try {
      operation.redispatchBoxed(keys & AFTER, stack);
    } catch (...) {
      if (token.number >= 0)
        finish(token.number, probe->is.failed, 0, probe->is.ended_by_error);
      throw;
    }
    if (token.number < 0) return;
    const uint64_t before = measured ? thread_cpu_ns() : 0;
    returned(*row, token, stack->back());
    if (measured) {
      const int at = token.thinned ? probe->is.own_thinned_ns_at : probe->is.own_ns_at;
      header(at).fetch_add(own_ns + thread_cpu_ns() - before);
      header(at + 8).fetch_add(1); // the count of calls stands just behind
    }
  }
};

// _c10d_functional::wait_tensor waits in C++: here the exposed wait of functional collectives shows
struct WaitTensor final : c10::OperatorKernel {
  void operator()(
      const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!probe->active.load(std::memory_order_relaxed))
      return operation.redispatchBoxed(keys & AFTER, stack);
    Measured tensor;
    try {
      measure(stack->back(), tensor);
    } catch (...) {
      count_error();
    }
    const Token token = take_wait(tensor.storage);
    const uint64_t began = now_ns();
    try {
      operation.redispatchBoxed(keys & AFTER, stack);
    } catch (...) {
      waited(token, began, true);
      throw;
    }
    if (token.number >= 0) waited(token, began, false);
  }
};

// --- the module --------------------------------------------------------------------------------

// Work.wait, in place of what the class had (bound as `original`): the same call, timed.
PyObject* wait(PyObject* original, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  const bool is_work = probe->active.load(std::memory_order_relaxed) &&
      num_positional(size_t(count)) > 0 && PyType_IsSubtype(arguments[0]->type, probe->work_type);
  if (!is_work) return PyObject_Vectorcall(original, arguments, size_t(count), names);
  auto* instance = reinterpret_cast<Instance*>(arguments[0]);
  const Token token = instance->simple_layout ? take_wait(instance->simple_value_holder[0]) : Token();
  const uint64_t began = now_ns();
  PyObject* result = PyObject_Vectorcall(original, arguments, size_t(count), names);
  if (is_work && token.number >= 0) waited(token, began, result == nullptr);
  return result;
}

PyMethodDef WAIT = {
    "wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(wait)),
    METH_FASTCALL | METH_KEYWORDS, "Wait until the operation is done (timed by Rankscope)."};

bool read_constants(PyObject* tuple, Constants& into) {
  if (PyTuple_Size(tuple) != NUM_CONSTANTS) return false;
  int* numbers = reinterpret_cast<int*>(&into);
  for (int at = 0; at < NUM_CONSTANTS; ++at)
    numbers[at] = int(PyLong_AsLong(PyTuple_GetItem(tuple, at)));
  return PyErr_Occurred() == nullptr;
}

bool map_ring(const char* path) {
  int file = open(path, O_RDWR | O_CLOEXEC);
  const off_t size = file < 0 ? -1 : lseek(file, 0, SEEK_END);
  if (size < 0) {
    if (file >= 0) close(file);
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    return false;
  }
  void* memory = mmap(nullptr, size_t(size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) {
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    return false;
  }
  probe->ring = static_cast<char*>(memory);
  probe->num_slots = (size_t(size) - size_t(probe->is.header_bytes)) / sizeof(Slot);
  return true;
}

// In a child the ring, its groups and perhaps a held lock are the parent's: it begins anew.
void after_fork() {
  Probe* inherited = probe;
  probe = new Probe;
  probe->c10d_library = std::move(inherited->c10d_library);
  probe->functional_library = std::move(inherited->functional_library);
  probe->work_type = inherited->work_type;
  latest_group = nullptr;
  own_thread_id = 0;
}

// open(path, layout, constants, dtypes, rank, recursion_at, define_group, is_inside, name_place,
//      engine_code)
PyObject* open_ring(PyObject*, PyObject* arguments) {
  const char *path, *layout;
  PyObject *constants, *dtypes, *define_group, *is_inside, *name_place, *engine_code;
  int rank, recursion_at;
  if (!PyArg_ParseTuple(arguments, "ssOO!iiOOOO", &path, &layout, &constants, &PyDict_Type, &dtypes,
                        &rank, &recursion_at, &define_group, &is_inside, &name_place, &engine_code))
    return nullptr;
  if (std::string(layout) != LAYOUT) {
    PyErr_SetString(PyExc_ValueError, "the probe was built for another layout of the ring");
    return nullptr;
  }
  if (probe == nullptr) {
    static_assert(sizeof(std::atomic<uint64_t>) == 8);
    probe = new Probe;
    pthread_atfork(nullptr, nullptr, after_fork);
  }
  if (!read_constants(constants, probe->is)) {
    if (PyErr_Occurred() == nullptr)
      PyErr_SetString(PyExc_ValueError, "the probe was built for other constants");
    return nullptr;
  }
  if (probe->ring == nullptr && !map_ring(path)) return nullptr;
  {
    std::lock_guard lock(probe->groups_mutex); // Python names them anew
    for (auto& known : probe->groups) known.second->forget();
    probe->groups.clear();
  }
  probe->dtype_of.assign(size_t(c10::ScalarType::NumOptions), 0);
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(dtypes, &at, &key, &value);) {
    const char* name = PyUnicode_AsUTF8AndSize(key, nullptr);
    for (int type = 0; name != nullptr && type < int(c10::ScalarType::NumOptions); ++type)
      if (std::string(name) == c10::toString(c10::ScalarType(type)))
        probe->dtype_of[size_t(type)] = int(PyLong_AsLong(value));
  }
  probe->rank = rank;
  probe->recursion_at =
      recursion_at <= int(THREAD_WORDS_BYTES - sizeof(int32_t)) ? recursion_at : -1;
  for (PyObject* kept : {define_group, is_inside, name_place, engine_code}) Py_IncRef(kept);
  probe->define_group = define_group;
  probe->is_inside = is_inside;
  probe->name_place = name_place;
  probe->engine_code = engine_code;
  return PyErr_Occurred() != nullptr ? nullptr : none();
}

void register_kernels(PyObject* rows) {
  probe->c10d_library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  for (Py_ssize_t at = 0; at < PyList_Size(rows); ++at) {
    const char* name;
    auto* row = new Row; // as long as the process: a call may be inside when kernels go
    int flags[5];
    if (!PyArg_ParseTuple(PyList_GetItem(rows, at), "siiiiiippppp", &name, &row->operation,
                          &row->group_at, &row->peer_at, &row->async_at, &row->reduce_at,
                          &row->num_arguments, flags, flags + 1, flags + 2, flags + 3, flags + 4))
      return;
    row->is_p2p = flags[0];
    row->is_barrier = flags[1];
    row->has_future = flags[2];
    row->root_hands_in = flags[3];
    row->root_receives = flags[4];
    probe->c10d_library->impl(
        name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(row)));
  }
  probe->functional_library = std::make_unique<torch::Library>(
      torch::Library::IMPL, "_c10d_functional", c10::DispatchKey::BackendSelect, __FILE__,
      __LINE__);
  probe->functional_library->impl(
      "wait_tensor", torch::CppFunction::makeFromBoxedFunctor(std::make_unique<WaitTensor>()));
}

// start(rows, work_type) -> the method that takes the place of work_type.wait
PyObject* start(PyObject*, PyObject* arguments) {
  PyObject *rows, *work_type;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &rows, &PyType_Type, &work_type))
    return nullptr;
  if (probe == nullptr || probe->ring == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "open() comes first");
    return nullptr;
  }
  PyObject* methods = PyObject_GetAttrString(work_type, "__dict__");
  PyObject* original = methods ? PyMapping_GetItemString(methods, "wait") : nullptr;
  release(methods);
  if (original == nullptr) return nullptr;
  Py_IncRef(work_type);
  probe->work_type = reinterpret_cast<PyTypeObject*>(work_type);
  try {
    register_kernels(rows);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  if (PyErr_Occurred() != nullptr) {
    probe->c10d_library.reset();
    probe->functional_library.reset();
    Py_DecRef(original);
    return nullptr;
  }
  probe->active = true;
  PyObject* function = PyCMethod_New(&WAIT, original, nullptr, nullptr);
  Py_DecRef(original);
  PyObject* method = function == nullptr ? nullptr : PyInstanceMethod_New(function);
  release(function);
  return method;
}

PyObject* stop(PyObject*, PyObject*) {
  if (probe != nullptr) {
    probe->active = false;
    probe->c10d_library.reset();
    probe->functional_library.reset();
  }
  return none();
}

PyObject* set_call_sites(PyObject*, PyObject* wanted) {
  if (probe != nullptr) probe->call_sites = PyObject_IsTrue(wanted) == 1;
  return none();
}

PyObject* ends_expected(PyObject*, PyObject*) {
  return PyLong_FromLongLong(probe == nullptr ? 0 : probe->ends_expected.load());
}

// --- does this binary fit this torch? ------------------------------------------------------------

// num_owners(work) -> how many references own the C++ work of this Python object, -1 if pybind11's
// objects are laid out in another way. The holder of a work is one pointer: that to the work.
PyObject* num_owners(PyObject*, PyObject* work) {
  auto* instance = reinterpret_cast<Instance*>(work);
  void* const value = instance->simple_value_holder[0];
  const bool is_known =
      instance->simple_layout && value != nullptr && value == instance->simple_value_holder[1];
  return PyLong_FromLongLong(
      is_known ? c10::raw::intrusive_ptr::use_count(static_cast<c10d::Work*>(value)) : -1);
}

// reads_tensors() -> whether a tensor that the installed torch makes reads here as what it is
PyObject* reads_tensors(PyObject*, PyObject*) {
  bool right = false;
  try {
    const at::Tensor tensor = at::detail::empty_cpu({3, 5}, c10::ScalarType::Double);
    const auto* body = tensor.unsafeGetTensorImpl();
    right = tensor.is_cpu() && tensor.layout() == at::kStrided && body->numel() == 15 &&
        body->itemsize() == 8 && !body->has_symbolic_sizes_strides() && body->has_storage() &&
        body->storage().nbytes() == 120 && tensor.use_count() == 1;
  } catch (...) {
  }
  return PyLong_FromLongLong(right);
}

// thread_words() -> the begin of this thread's PyThreadState: Python looks for the recursion in it
PyObject* thread_words(PyObject*, PyObject*) {
  return PyBytes_FromStringAndSize(
      reinterpret_cast<const char*>(PyThreadState_Get()), Py_ssize_t(THREAD_WORDS_BYTES));
}

PyMethodDef METHODS[] = {
    {"num_owners", num_owners, METH_O, "How many references own a Work; -1: no known layout."},
    {"reads_tensors", reads_tensors, METH_NOARGS, "Whether torch's tensors read as what they are."},
    {"thread_words", thread_words, METH_NOARGS, "Return the begin of PyThreadState."},
    {"open", open_ring, METH_VARARGS, "Map the ring of this rank."},
    {"start", start, METH_VARARGS, "Register the kernels; return the new Work.wait."},
    {"stop", stop, METH_NOARGS, "Take the kernels out again."},
    {"ends_expected", ends_expected, METH_NOARGS, "How many ends are still to be told."},
    {"set_call_sites", set_call_sites, METH_O, "Whether places in the code are looked up."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef MODULE = {
    .name = "rankscope_probe", .doc = "The native source of collectives.", .size = -1,
    .methods = METHODS};

#define TEXT_OF(number) #number
#define TEXT(number) TEXT_OF(number)

} // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_rankscope_probe() {
  PyObject* module = PyModule_Create2(&MODULE, PYTHON_ABI_VERSION);
  if (module != nullptr)
    PyModule_AddStringConstant(
        module, "torch_minor", TEXT(TORCH_VERSION_MAJOR) "." TEXT(TORCH_VERSION_MINOR));
  return module;
}
