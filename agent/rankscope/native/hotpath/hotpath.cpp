// The twin of clock.py and waits.py: the same state under the same names, and the same results, at
// a fraction of the memory that Python touches for them. Training pushes all of it out of the
// processor's caches between two calls, which is most of what a step costs.
//
// It knows nothing of PyTorch: one binary for each machine serves every version of it and of
// Python, made by `.ci/build_probes.py`. All calls hold the interpreter lock.

#include "python_types.hpp"

#include <pthread.h>
#include <sys/resource.h>
#include <time.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// --- the rings: `files/ring.py` owns the layouts and compares them with this text -----------

constexpr char LAYOUT[] =
    "number:Q arrived_ns:Q started_ns:Q returned_ns:Q ended_ns:Q input_bytes:Q output_bytes:Q "
    "blocked_ns:Q sequence:I step:I thread_id:I peer_rank:i call_site:I group_id:H num_tensors:H "
    "operation:B state:B dtype:B flags:B reduce_op:B issued_by:B ended_by:B reserved:B | "
    "number:Q started_ns:Q ended_ns:Q other_ns:Q data_ns:Q forward_ns:Q backward_ns:Q "
    "optimizer_ns:Q checkpoint_ns:Q evaluation_ns:Q forward_blocked_ns:Q backward_blocked_ns:Q "
    "optimizer_blocked_ns:Q other_blocked_ns:Q cpu_ns:Q process_cpu_ns:Q gc_ns:Q copy_ns:Q step:I "
    "microbatches:I num_collectives:I flags:I minor_faults:I major_faults:I voluntary_switches:I "
    "involuntary_switches:I";

enum Phase { OTHER, DATA, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, EVALUATION, NUM_PHASES };

struct CollectiveSlot {
  uint64_t number, arrived_ns, started_ns, returned_ns, ended_ns, input_bytes, output_bytes,
      blocked_ns;
  uint32_t sequence, step, thread_id;
  int32_t peer_rank;
  uint32_t call_site;
  uint16_t group_id, num_tensors;
  uint8_t operation, state, dtype, flags, reduce_op, issued_by, ended_by, reserved;
};
static_assert(sizeof(CollectiveSlot) == 96);

struct StepSlot {
  uint64_t number, started_ns, ended_ns, spent_ns[NUM_PHASES];
  uint64_t forward_blocked_ns, backward_blocked_ns, optimizer_blocked_ns, other_blocked_ns;
  uint64_t cpu_ns, process_cpu_ns, gc_ns, copy_ns;
  uint32_t step, microbatches, num_collectives, flags, of_the_kernel[4];
};
static_assert(sizeof(StepSlot) == 176);

// Numbers that Python hands over, in the order of CONSTANTS in native.py.
struct Constants {
  int header_bytes, head_at, heartbeat_at, phase_since_at, phase_at, clock_at, blocked_at,
      latest_end_at, engine_number_at, engine_arrived_at, engine_site_at, thinned_at;
  int ended, flag_by_engine, step_checkpoint, step_evaluation, renew_clock_ns;
  int at_once, most_looked_at, first_passes, longer, shorter, most_copied, sizes_hold, no_engine;
} is;
constexpr int NUM_CONSTANTS = sizeof(Constants) / sizeof(int);

uint64_t now_ns(clockid_t clock = CLOCK_MONOTONIC) {
  timespec time;
  clock_gettime(clock, &time);
  return uint64_t(time.tv_sec) * 1000000000u + uint64_t(time.tv_nsec);
}

PyObject* error(PyObject* kind, const char* text) {
  PyErr_SetString(kind, text);
  return nullptr;
}

struct Ring {
  char* memory;
  uint64_t num_slots;

  uint64_t& word(int at) const { return *reinterpret_cast<uint64_t*>(memory + at); }

  template <class Slot> Slot& slot(uint64_t number) const {
    return *reinterpret_cast<Slot*>(
        memory + is.header_bytes + number % num_slots * sizeof(Slot));
  }

  void renew_clock() const {
    uint64_t* clock = &word(is.clock_at);
    const uint64_t version = clock[0] | 1;
    __atomic_store_n(clock, version, __ATOMIC_SEQ_CST);
    clock[1] = now_ns();
    clock[2] = now_ns(CLOCK_REALTIME);
    __atomic_store_n(clock, version + 1, __ATOMIC_SEQ_CST);
  }
};

// Take the memory of a `files.ring.RingWriter`, which then stays as long as the process; false
// with an exception where it has none.
bool take_ring(PyObject* writer, size_t slot_bytes, Ring& into) {
  PyObject* buffer = PyObject_GetAttrString(writer, "buffer");
  Py_buffer view;
  const bool has_memory = buffer != nullptr && PyObject_GetBuffer(buffer, &view, WRITABLE) == 0;
  if (buffer != nullptr) Py_DecRef(buffer);
  if (!has_memory) return false;
  if (view.length <= is.header_bytes) return error(PyExc_ValueError, "not a ring") != nullptr;
  into = {static_cast<char*>(view.memory), uint64_t(view.length - is.header_bytes) / slot_bytes};
  return true;
}

// --- the clock: see clock.py ----------------------------------------------------------------------

struct Counters {
  uint64_t cpu_ns, process_cpu_ns;
  uint32_t of_the_kernel[4];
};

Counters read_counters() {
  rusage usage;
  getrusage(RUSAGE_THREAD, &usage);
  return {now_ns(CLOCK_THREAD_CPUTIME_ID), now_ns(CLOCK_PROCESS_CPUTIME_ID),
          {uint32_t(usage.ru_minflt), uint32_t(usage.ru_majflt), uint32_t(usage.ru_nvcsw),
           uint32_t(usage.ru_nivcsw)}};
}

struct Clock {
  PyObject head;
  int phase, explicit_depth, microbatches, flags;
  char saw_backward, past_first, sees_data, forward_is_explicit, is_attached;
  unsigned long thread;
  long long step, num_backwards, since_ns, started_ns, gap_ns, gap_blocked_ns, blocked_seen_ns,
      gc_ns, copy_ns;
  PyObject* on_phase;
  // what Python does not see:
  PyObject *header_of, *steps_of; // the writers whose rings these are
  Ring header, steps;
  uint64_t clock_due_ns;
  int64_t spent[NUM_PHASES], blocked[NUM_PHASES];
  Counters counters;

  void add_blocked_ns(int64_t duration_ns) {
    blocked[phase] += duration_ns;
    if (phase == OTHER) gap_blocked_ns += duration_ns;
  }

  void account_now() {
    const int64_t now = int64_t(now_ns());
    if (is_attached) {
      const int64_t blocked_ns =
          int64_t(__atomic_load_n(&header.word(is.blocked_at), __ATOMIC_RELAXED));
      if (blocked_ns != blocked_seen_ns) {
        add_blocked_ns(blocked_ns - blocked_seen_ns);
        blocked_seen_ns = blocked_ns;
      }
    }
    const int64_t elapsed = now - since_ns;
    spent[phase] += elapsed;
    if (phase == OTHER) gap_ns += elapsed;
    since_ns = now;
  }

  bool is_of_this_thread() const { return (unsigned long)(pthread_self()) == thread; }

  void shift(int source, int target, int64_t spent_ns, int64_t blocked_ns) {
    spent[source] -= spent_ns;
    spent[target] += spent_ns;
    blocked[source] -= blocked_ns;
    blocked[target] += blocked_ns;
  }

  bool change(int next) { // false with an exception of `on_phase`
    if (!is_of_this_thread()) return true;
    const int before = phase;
    const bool begins_backward = next == BACKWARD && before != BACKWARD;
    const bool gap_is_forward = !forward_is_explicit && (past_first || !sees_data);
    const bool was_forward = begins_backward && before == OTHER && gap_is_forward;
    if (on_phase != nullptr && on_phase != &_Py_NoneStruct && next != before) {
      PyObject* answer = PyObject_CallFunction(on_phase, "i", was_forward ? int(FORWARD) : before);
      if (answer == nullptr) return false;
      Py_DecRef(answer);
    }
    account_now();
    if (was_forward) shift(OTHER, FORWARD, gap_ns, gap_blocked_ns);
    if (begins_backward) past_first = 1;
    if (next != OTHER || before != OTHER) gap_ns = gap_blocked_ns = 0;
    if (next == CHECKPOINT) flags |= is.step_checkpoint;
    if (next == EVALUATION) flags |= is.step_evaluation;
    phase = next;
    if (is_attached) {
      header.word(is.phase_since_at) = header.word(is.heartbeat_at) = uint64_t(since_ns);
      header.memory[is.phase_at] = char(next);
    }
    return true;
  }

  void begin() {
    started_ns = since_ns;
    std::memset(spent, 0, sizeof spent);
    std::memset(blocked, 0, sizeof blocked);
    gap_ns = gap_blocked_ns = gc_ns = copy_ns = 0;
    microbatches = flags = 0;
    saw_backward = past_first = 0;
  }

  void write(const Counters& now, long num_collectives, long more_flags) {
    const uint64_t number = steps.word(is.head_at);
    StepSlot& slot = steps.slot<StepSlot>(number);
    __atomic_store_n(&slot.number, 0, __ATOMIC_SEQ_CST);
    slot.started_ns = uint64_t(started_ns);
    slot.ended_ns = uint64_t(since_ns);
    for (int each = 0; each < NUM_PHASES; ++each) slot.spent_ns[each] = uint64_t(spent[each]);
    slot.forward_blocked_ns = uint64_t(blocked[FORWARD]);
    slot.backward_blocked_ns = uint64_t(blocked[BACKWARD]);
    slot.optimizer_blocked_ns = uint64_t(blocked[OPTIMIZER]);
    slot.other_blocked_ns =
        uint64_t(blocked[OTHER] + blocked[DATA] + blocked[CHECKPOINT] + blocked[EVALUATION]);
    slot.cpu_ns = now.cpu_ns - counters.cpu_ns;
    slot.process_cpu_ns = now.process_cpu_ns - counters.process_cpu_ns;
    slot.gc_ns = uint64_t(gc_ns);
    slot.copy_ns = uint64_t(copy_ns);
    slot.step = uint32_t(step);
    slot.microbatches = uint32_t(microbatches);
    slot.num_collectives = uint32_t(num_collectives);
    slot.flags = uint32_t(flags | more_flags);
    for (int each = 0; each < 4; ++each)
      slot.of_the_kernel[each] = now.of_the_kernel[each] - counters.of_the_kernel[each];
    __atomic_store_n(&slot.number, number + 1, __ATOMIC_RELEASE);
    __atomic_store_n(&steps.word(is.head_at), number + 1, __ATOMIC_RELEASE);
    if (uint64_t(since_ns) > clock_due_ns) {
      clock_due_ns = uint64_t(since_ns + is.renew_clock_ns);
      header.renew_clock();
      steps.renew_clock();
    }
  }
};

Clock& clock_of(PyObject* self) { return *reinterpret_cast<Clock*>(self); }

PyObject* clock_attach(PyObject* self, PyObject* arguments) {
  PyObject *header, *steps;
  if (!PyArg_ParseTuple(arguments, "OO", &header, &steps)) return nullptr;
  Clock& clock = clock_of(self);
  if (header != clock.header_of || steps != clock.steps_of) {
    if (!take_ring(header, sizeof(CollectiveSlot), clock.header) ||
        !take_ring(steps, sizeof(StepSlot), clock.steps))
      return nullptr;
    Py_IncRef(header); // no other one gets their addresses
    Py_IncRef(steps);
    clock.header_of = header;
    clock.steps_of = steps;
  }
  clock.is_attached = 1;
  return none();
}

PyObject* clock_detach(PyObject* self, PyObject*) {
  clock_of(self).is_attached = 0;
  return none();
}

PyObject* clock_is_ours(PyObject* self, PyObject*) {
  return PyBool_FromLong(clock_of(self).is_of_this_thread());
}

// enter(phase, counts=True)
PyObject* clock_enter(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  const Py_ssize_t given = count + (names == nullptr ? 0 : PyTuple_Size(names));
  if (given < 1 || given > 2) return error(PyExc_TypeError, "enter(phase, counts=True)");
  const long next = PyLong_AsLong(arguments[0]);
  if (next < 0 || next >= NUM_PHASES) return error(PyExc_ValueError, "no such phase");
  const bool counts = given == 1 || PyObject_IsTrue(arguments[1]) == 1;
  Clock& clock = clock_of(self);
  const int before = clock.phase;
  if (next == BACKWARD && (before != BACKWARD || clock.explicit_depth)) {
    clock.saw_backward = 1;
    clock.num_backwards += counts;
    clock.microbatches += counts;
  }
  if (!clock.explicit_depth && !clock.change(int(next))) return nullptr;
  return PyLong_FromLong(before);
}

PyObject* clock_switch(PyObject* self, PyObject* phase) {
  const long next = PyLong_AsLong(phase);
  if (next < 0 || next >= NUM_PHASES) return error(PyExc_ValueError, "no such phase");
  return clock_of(self).change(int(next)) ? none() : nullptr;
}

PyObject* clock_account(PyObject* self, PyObject*) {
  clock_of(self).account_now();
  return none();
}

PyObject* clock_add_blocked(PyObject* self, PyObject* duration) {
  const long long duration_ns = PyLong_AsLongLong(duration);
  if (duration_ns == -1 && PyErr_Occurred() != nullptr) return nullptr;
  clock_of(self).add_blocked_ns(duration_ns);
  return none();
}

PyObject* all_phases(const int64_t* ns) {
  return Py_BuildValue("(LLLLLLL)", (long long)ns[0], (long long)ns[1], (long long)ns[2],
                       (long long)ns[3], (long long)ns[4], (long long)ns[5], (long long)ns[6]);
}

PyObject* clock_spent(PyObject* self, PyObject*) { return all_phases(clock_of(self).spent); }
PyObject* clock_blocked(PyObject* self, PyObject*) { return all_phases(clock_of(self).blocked); }

PyObject* clock_move(PyObject* self, PyObject* arguments) {
  int source, target;
  long long spent_ns, blocked_ns;
  if (!PyArg_ParseTuple(arguments, "iiLL", &source, &target, &spent_ns, &blocked_ns))
    return nullptr;
  if (source < 0 || source >= NUM_PHASES || target < 0 || target >= NUM_PHASES)
    return error(PyExc_ValueError, "no such phase");
  clock_of(self).shift(source, target, spent_ns, blocked_ns);
  return none();
}

PyObject* clock_take_counters(PyObject* self, PyObject*) {
  clock_of(self).counters = read_counters();
  return none();
}

PyObject* clock_close(PyObject* self, PyObject* arguments) {
  long num_collectives, flags;
  if (!PyArg_ParseTuple(arguments, "ll", &num_collectives, &flags)) return nullptr;
  Clock& clock = clock_of(self);
  const Counters now = read_counters();
  PyObject* ended = Py_BuildValue("(LLii)", clock.step, clock.since_ns - clock.started_ns,
                                  clock.microbatches, clock.flags);
  if (clock.is_attached && num_collectives >= 0) clock.write(now, num_collectives, flags);
  ++clock.step;
  clock.counters = now;
  clock.begin();
  return ended;
}

PyObject* clock_restart(PyObject* self, PyObject*) {
  Clock& clock = clock_of(self);
  clock.counters = read_counters();
  clock.begin();
  return none();
}

int clock_init(PyObject* self, PyObject*, PyObject*) {
  clock_of(self).counters = read_counters();
  return 0;
}

PyCFunction with_names(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef CLOCK_METHODS[] = {
    {"attach", clock_attach, METH_VARARGS, "Write to these rings from now on."},
    {"detach", clock_detach, METH_NOARGS, "Write nothing any more."},
    {"is_ours", clock_is_ours, METH_NOARGS, "Whether this thread's time is the step's time."},
    {"enter", with_names(clock_enter), METH_FASTCALL | METH_KEYWORDS,
     "Begin a phase; return the one before."},
    {"switch", clock_switch, METH_O, "Begin a phase, inside a named one as well."},
    {"account", clock_account, METH_NOARGS, "Give the time until now to the phase of now."},
    {"add_blocked", clock_add_blocked, METH_O, "Add time blocked on peers, in the phase of now."},
    {"spent", clock_spent, METH_NOARGS, "Return the ns of the step in each phase."},
    {"blocked", clock_blocked, METH_NOARGS, "Return the ns of them that were blocked."},
    {"move", clock_move, METH_VARARGS, "Count time of one phase as another's."},
    {"take_counters", clock_take_counters, METH_NOARGS, "Count CPU time and such from here."},
    {"close", clock_close, METH_VARARGS, "End the step; return number, ns, microbatches, flags."},
    {"restart", clock_restart, METH_NOARGS, "Forget the step so far."},
    {nullptr, nullptr, 0, nullptr}};

#define MEMBER(name, type, field) {name, type, offsetof(Clock, field), 0, nullptr}
PyMemberDef CLOCK_MEMBERS[] = {
    MEMBER("phase", T_INT, phase), MEMBER("explicit", T_INT, explicit_depth),
    MEMBER("microbatches", T_INT, microbatches), MEMBER("flags", T_INT, flags),
    MEMBER("saw_backward", T_BOOL, saw_backward), MEMBER("past_first", T_BOOL, past_first),
    MEMBER("sees_data", T_BOOL, sees_data),
    MEMBER("forward_is_explicit", T_BOOL, forward_is_explicit),
    MEMBER("thread", T_ULONG, thread), MEMBER("step", T_LONGLONG, step),
    MEMBER("num_backwards", T_LONGLONG, num_backwards), MEMBER("since_ns", T_LONGLONG, since_ns),
    MEMBER("started_ns", T_LONGLONG, started_ns), MEMBER("gap_ns", T_LONGLONG, gap_ns),
    MEMBER("gap_blocked_ns", T_LONGLONG, gap_blocked_ns),
    MEMBER("blocked_seen_ns", T_LONGLONG, blocked_seen_ns), MEMBER("gc_ns", T_LONGLONG, gc_ns),
    MEMBER("copy_ns", T_LONGLONG, copy_ns), MEMBER("on_phase", T_OBJECT, on_phase),
    {nullptr, 0, 0, 0, nullptr}};

// --- the wait of DDP at the end of a backward pass: see waits.py ------------------------------------

struct Wait {
  PyObject head;
  long long begun_at, after_ns, num_known;
  // what Python does not see:
  Ring ring;
  double copied;
  int64_t copied_of_slots, copied_of_bytes;
  int copied_for;

  CollectiveSlot& slot(int64_t number) const { return ring.slot<CollectiveSlot>(uint64_t(number)); }

  int64_t first(int64_t last) const { // of the slots that are looked at
    const int64_t oldest = last - is.most_looked_at + 1;
    return begun_at > oldest ? begun_at : oldest;
  }

  bool have_ended(int64_t last) const {
    int seen = 0;
    for (int64_t number = last; number >= first(last) && seen < is.at_once; --number) {
      const CollectiveSlot& one = slot(number);
      if (!(one.flags & is.flag_by_engine)) continue;
      if (__atomic_load_n(&one.state, __ATOMIC_ACQUIRE) < is.ended) return false;
      ++seen;
    }
    return true;
  }

  double earlier(int64_t last, uint64_t own) const {
    uint64_t others = 0;
    for (int64_t number = last - 1; number >= first(last); --number) {
      const CollectiveSlot& one = slot(number);
      if (one.flags & is.flag_by_engine) others += one.input_bytes < own ? one.input_bytes : own;
    }
    return own ? double(others) / double(own) : 0.0;
  }

  void look_at_sizes(int64_t last) {
    const uint64_t own = slot(last).input_bytes;
    --copied_for;
    if (copied_of_slots != last - begun_at || copied_of_bytes != int64_t(own) || copied_for <= 0) {
      copied_of_slots = last - begun_at;
      copied_of_bytes = int64_t(own);
      copied_for = is.sizes_hold;
      copied = earlier(last, own);
    }
  }

  void learn(int64_t after) {
    if (num_known < is.first_passes) {
      after_ns = num_known && after_ns < after ? after_ns : after;
    } else {
      const int64_t longer = after - after_ns;
      after_ns += longer > 0 ? longer / is.longer : -((-longer + is.shorter - 1) / is.shorter);
    }
    ++num_known;
  }

  int64_t end_of(int64_t number, int64_t arrived, bool is_known, double copies, int64_t now) {
    int64_t ended = 0;
    if (is_known) {
      const int64_t latest =
          int64_t(__atomic_load_n(&ring.word(is.latest_end_at), __ATOMIC_RELAXED));
      ended = latest < now ? latest : now;
      learn(now - ended);
    }
    if (!num_known) return 0;
    const int64_t until = ended > now - after_ns ? ended : now - after_ns;
    int64_t blocked = until > arrived ? until - arrived : 0;
    const int64_t copying = int64_t(copies * double(after_ns)), most = blocked / is.most_copied;
    blocked -= copying < most ? copying : most;
    CollectiveSlot& one = slot(number);
    if (__atomic_load_n(&one.number, __ATOMIC_ACQUIRE) == uint64_t(number) + 1)
      one.blocked_ns += uint64_t(blocked);
    return blocked;
  }
};

Wait& wait_of(PyObject* self) { return *reinterpret_cast<Wait*>(self); }

int wait_init(PyObject* self, PyObject* arguments, PyObject*) {
  PyObject* writer;
  if (!PyArg_ParseTuple(arguments, "O", &writer)) return -1;
  return take_ring(writer, sizeof(CollectiveSlot), wait_of(self).ring) ? 0 : -1;
}

PyObject* wait_begin(PyObject* self, PyObject*) {
  Wait& wait = wait_of(self);
  wait.ring.word(is.engine_number_at) = wait.ring.word(is.engine_site_at) = 0;
  wait.begun_at = (long long)(wait.ring.word(is.head_at));
  return none();
}

PyObject* wait_end_of_engine(PyObject* self, PyObject* time) {
  const long long now = PyLong_AsLongLong(time);
  if (now == -1 && PyErr_Occurred() != nullptr) return nullptr;
  Wait& wait = wait_of(self);
  const int64_t number = int64_t(wait.ring.word(is.engine_number_at)) - 1;
  if (number < 0) return PyLong_FromLongLong(is.no_engine);
  wait.ring.word(is.engine_number_at) = 0;
  bool is_known = false;
  if (!wait.ring.memory[is.thinned_at]) {
    is_known = wait.have_ended(number);
    wait.look_at_sizes(number);
  }
  const int64_t arrived = int64_t(wait.ring.word(is.engine_arrived_at));
  return PyLong_FromLongLong(wait.end_of(number, arrived, is_known, wait.copied, now));
}

PyObject* wait_end_of(PyObject* self, PyObject* arguments) {
  long long number, arrived, now;
  int is_known;
  double copied;
  if (!PyArg_ParseTuple(arguments, "LLpdL", &number, &arrived, &is_known, &copied, &now))
    return nullptr;
  return PyLong_FromLongLong(wait_of(self).end_of(number, arrived, is_known, copied, now));
}

PyMethodDef WAIT_METHODS[] = {
    {"begin", wait_begin, METH_NOARGS, "Forget the collectives of the pass before."},
    {"end_of_engine", wait_end_of_engine, METH_O, "Return how long DDP waited, in ns."},
    {"end_of", wait_end_of, METH_VARARGS, "Return how long it waited for this collective, in ns."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef WAIT_MEMBERS[] = {
    {"begun_at", T_LONGLONG, offsetof(Wait, begun_at), 0, nullptr},
    {"after_ns", T_LONGLONG, offsetof(Wait, after_ns), 0, nullptr},
    {"num_known", T_LONGLONG, offsetof(Wait, num_known), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

// --- the module -----------------------------------------------------------------------------------

void* address(int (*function)(PyObject*, PyObject*, PyObject*)) {
  return reinterpret_cast<void*>(function);
}

PyType_Slot CLOCK_SLOTS[] = {
    {TP_INIT, address(clock_init)}, {TP_METHODS, CLOCK_METHODS}, {TP_MEMBERS, CLOCK_MEMBERS}, {0, nullptr}};
PyType_Slot WAIT_SLOTS[] = {
    {TP_INIT, address(wait_init)}, {TP_METHODS, WAIT_METHODS}, {TP_MEMBERS, WAIT_MEMBERS}, {0, nullptr}};
PyType_Spec CLOCK = {"rankscope_hotpath.ClockCore", sizeof(Clock), 0, TYPE_FLAGS, CLOCK_SLOTS};
PyType_Spec WAIT = {"rankscope_hotpath.WaitCore", sizeof(Wait), 0, TYPE_FLAGS, WAIT_SLOTS};

// configure(layout, constants)
PyObject* configure(PyObject*, PyObject* arguments) {
  const char* layout;
  PyObject* constants;
  if (!PyArg_ParseTuple(arguments, "sO", &layout, &constants)) return nullptr;
  if (std::strcmp(layout, LAYOUT) != 0)
    return error(PyExc_ValueError, "made for other layouts of the rings");
  if (PyTuple_Size(constants) != NUM_CONSTANTS)
    return error(PyExc_ValueError, "made for other constants");
  int* numbers = reinterpret_cast<int*>(&is);
  for (int at = 0; at < NUM_CONSTANTS; ++at)
    numbers[at] = int(PyLong_AsLong(PyTuple_GetItem(constants, at)));
  return PyErr_Occurred() != nullptr ? nullptr : none();
}

PyMethodDef METHODS[] = {
    {"configure", configure, METH_VARARGS, "Take over the layouts and the numbers of the wire."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef MODULE = {
    .name = "rankscope_hotpath", .doc = "The hot path of the step clock.", .size = -1,
    .methods = METHODS};

} // namespace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_rankscope_hotpath() {
  PyObject* module = PyModule_Create2(&MODULE, PYTHON_ABI_VERSION);
  if (module == nullptr) return nullptr;
  PyObject *clock = PyType_FromSpec(&CLOCK), *wait = PyType_FromSpec(&WAIT);
  const bool is_made = clock != nullptr && wait != nullptr &&
      PyModule_AddObjectRef(module, "ClockCore", clock) == 0 &&
      PyModule_AddObjectRef(module, "WaitCore", wait) == 0;
  return is_made ? module : nullptr;
}
