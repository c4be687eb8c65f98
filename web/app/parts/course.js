/** Step times of two sides over one axis of steps; loaded with the charts. */

import { Series } from '../charts/series.js';
import { count } from '../format.js';
import { el, t } from '../tags.js';

/** @typedef {import('../../types/api.js').CompareCourse} CourseData */

/** @param {{course: CourseData, before: string, after: string}} props */
export function Course({ course, before, after }) {
  const apart = course.before_step[0] !== course.after_step[0];
  return t.div(
    { class: 'padded' },
    el(Series, {
      title: `Step time${course.bin > 1 ? `, median of ${count(course.bin)} steps` : ''}`,
      note: `orange: ${after}; grey and band: ${before}${course.bin > 1 ? ', least to largest' : ''}${
        apart ? `; axis: its steps, ${after} begins at step ${count(course.after_step[0])}` : ''
      }`,
      x: course.before_step,
      low: course.before_min_ms,
      high: course.before_max_ms,
      line: course.before_median_ms,
      over: course.after_median_ms,
      unit: 'ms',
      time: false,
      height: 200,
    }),
  );
}
